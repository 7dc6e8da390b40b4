"""`python -m paritygate.server`: serve one model until interrupted."""

import argparse
import gc
import json
import signal
import sys
import threading

from paritygate.bootstrap import Parser, exit_code
from paritygate.extras import require
from paritygate.server.running import DTYPES, start

THREADS = (
    "CPU threads for the model (default 1). Results keep their bits at any number where a C++ compiler is at hand; "
    "without one they are promised at 1 only"
)

SHARE = (
    "instead of --threads: the machine's cores (4 at most) divided among this user's busy servers that share them; one "
    "without a C++ compiler"
)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, serve, return the exit code (0 after SIGINT or SIGTERM)."""
    parser = Parser(prog="python -m paritygate.server", description=__doc__)
    parser.add_argument("--model", required=True, help="tiny, smollm2, or a local transformers folder (safetensors)")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--api-key", help="must start with tml-; the default is a fresh random one")
    parser.add_argument("--state", metavar="DIR", help="where saved states live (default: gone with the server)")
    threads = parser.add_mutually_exclusive_group()
    threads.add_argument("--threads", type=int, default=1, help=THREADS)
    threads.add_argument("--share-cores", action="store_true", help=SHARE)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the frozen weights (default float32)")
    args = parser.parse_args(argv)
    return exit_code("paritygate.server", lambda: serve(args))


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; raises what `start` raises."""
    require("server")
    signals = (signal.SIGINT, signal.SIGTERM)
    stopped = threading.Event()

    def leave(*_: object) -> None:
        stopped.set()
        sys.exit(0)

    for number in signals:
        signal.signal(number, leave)  # building or loading a model can take a minute
    gc.disable()  # a fifth of the time that importing torch and transformers takes
    running = start(
        args.model,
        port=args.port,
        api_key=args.api_key,
        state_dir=args.state,
        threads=args.threads,
        share_cores=args.share_cores,
        dtype=args.dtype,
    )
    gc.enable()
    for number in signals:
        signal.signal(number, lambda *_: stopped.set())
    ready = {
        "base_url": running.base_url,
        "api_key": running.api_key,
        "model": running.model_name,
        "tokenizer": str(running.tokenizer),
    }
    with running:
        print(json.dumps(ready), flush=True)
        stopped.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
