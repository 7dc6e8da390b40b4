"""The benchmark's data and one fresh environment an episode, from where the run was told to take them."""

from paritygate import retail
from paritygate.errors import BadInputError
from paritygate.experiment.run.options import Options
from paritygate.retail import Episode, RetailEpisode, Source

ENVIRONMENTS = ("own", "upstream")


def load_source(options: Options) -> Source:
    """The pinned retail data; raises DataError or BadInputError (exit 2) in one sentence where there is none."""
    if options.environment not in ENVIRONMENTS:
        raise BadInputError(f"--environment {options.environment}: there are {' and '.join(ENVIRONMENTS)}.")
    if options.environment == "upstream":
        from paritygate.retail.upstream import package

        package()
    return retail.load(options.tau_bench)


def fresh_episode(options: Options, source: Source, split: str, index: int) -> Episode:
    """Task `index` of `split` on a database that no other episode shares."""
    if options.environment == "upstream":
        from paritygate.retail.upstream import UpstreamEpisode

        return UpstreamEpisode(source, split, index)
    return RetailEpisode(source, split, index)
