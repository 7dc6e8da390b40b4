"""tau-bench retail: the data, the sixteen tools, the environment and its grading, as upstream at 59a200c6 has them."""

from paritygate.retail.database import Database, database_hash
from paritygate.retail.episode import Episode, Grade, RetailEpisode
from paritygate.retail.errors import DataError, EpisodeOver
from paritygate.retail.source import Action, Source, Task, load
from paritygate.retail.tools import call

__all__ = [
    "Action",
    "DataError",
    "Database",
    "Episode",
    "EpisodeOver",
    "Grade",
    "RetailEpisode",
    "Source",
    "Task",
    "call",
    "database_hash",
    "load",
]
