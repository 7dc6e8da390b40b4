"""An address that is none, or that has a secret in it: one sentence that does not show the secret, at once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paritygate.address import checked_url, shown
from paritygate.backend import connect
from paritygate.errors import BadInputError
from paritygate.service.__main__ import main
from tests.spec.test_command_line import SPECS, refused, run

SECRET = "s3cret"
NO_ADDRESS = (
    "localhost",
    "localhost:8000",
    "http//x",
    "http:/x",
    "ftp://x",
    "http://",
    "http://:8000",
    "http://x:99999",
    "http://x:0",
    "http://x:port",
    "http://[::1",
    "http://a b",
    "http://x/a b",
    " http://x",
    "http://x\n",
    "http://x\u00a0",
    "http://x\x7f",
    " ",
    f"me:{SECRET}@x",
    f"http//me:{SECRET}@x",
    f"https://me:{SECRET}/2@x",
    f"https://me:{SECRET}#2@x",
    f"//{SECRET}://x@",
    f"ftp://me:{SECRET}@x?token={SECRET}",
    f"tml-{SECRET}",
    f"tml-{SECRET}/api",
)
WITH_A_SECRET = (
    f"http://me:{SECRET}@x",
    f"http://{SECRET}@x/",
    "http://@x",
    f"http://me:a@{SECRET}@x",
    f"http://x?token={SECRET}",
    f"http://x?token=a@{SECRET}",
    f"http://x/?token={SECRET}",
    f"http://x/#{SECRET}",
    f"http://me:{SECRET}@x?token={SECRET}#{SECRET}",
    f"https://me:a@{SECRET}#2@x",
    f"https://me:1?@{SECRET}",
    "http://x/?",
    f"http://x/v1/tml-{SECRET}",
    f"http://x/tml-{SECRET}/api/",
    f"http://x/%74ml%2D{SECRET}/api",
    f"http://x/v1;key=tml-{SECRET}",
    f"https://x/eyJ{SECRET}.{SECRET}.{SECRET}/",
    f"http://x/{SECRET}-of-the-environment/",
)


@pytest.mark.parametrize("url", [*NO_ADDRESS, *WITH_A_SECRET])
def test_what_is_no_address_is_bad_input_and_no_secret_is_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given to a session by name, and by the environment."""
    monkeypatch.setenv("TINKER_API_KEY", f"{SECRET}-of-the-environment")

    async def by_name() -> None:
        async with connect(url, "tml-x"):
            pass

    async def by_the_environment() -> None:
        monkeypatch.setenv("TINKER_BASE_URL", url)
        async with connect(api_key="tml-x", embedded_model="none"):
            pass

    says = "is no address" if url in NO_ADDRESS else "holds more than an address"
    for place, name in ((by_name, "base_url"), (by_the_environment, "TINKER_BASE_URL")):
        with pytest.raises(BadInputError, match=f"^{name} '.*' {says}") as error:
            asyncio.run(place())
        assert error.value.exit_code == 2
        assert SECRET not in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://tinker.example/services/prod//", "https://tinker.example/services/prod"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://localhost", "http://localhost"),
        ("http://tml-gateway:8000/my-tml-api/tml/", "http://tml-gateway:8000/my-tml-api/tml"),
    ],
)
def test_an_address_is_taken_without_its_final_slash(url: str, base: str) -> None:
    assert checked_url(url, "it") == base
    assert shown(url) == url


def test_commands_refuse_it_before_anything_is_asked_or_made(
    tmp_path: Path, tau_bench_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    spec, output, proof = SPECS / "sdpo.json", tmp_path / "run", tmp_path / "proof.json"
    arguments = ("--spec", spec, "--output", output, "--tau-bench")
    for url, says in (("localhost", "is no address"), (f"http://me:{SECRET}@127.0.0.1:9", "holds more than")):
        refused(run(*arguments, tau_bench_dir, TINKER_BASE_URL=url), 2, f"TINKER_BASE_URL {shown(url)!r} {says}")
        assert main(["--base-url", url, "--json", str(proof)]) == 2
        assert f"--base-url {shown(url)!r} {says}" in capsys.readouterr().err
    plan = run("--check", *arguments, tmp_path / "no data", TINKER_BASE_URL=url)
    assert (plan.returncode, f"service: TINKER_BASE_URL {shown(url)!r} {says}" in plan.stdout) == (0, True)
    assert SECRET not in plan.stdout
    assert not list(tmp_path.iterdir())
