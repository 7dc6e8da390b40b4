"""The rubric judge: a served model or rules, the same interface; strict reading of answers, fenced transcripts."""

from paritygate.agent.judge.agreement import agreement
from paritygate.agent.judge.judgement import Answer, Judge, Judged, Judgement, parse_judgement
from paritygate.agent.judge.model import ModelJudge, fenced
from paritygate.agent.judge.rules import RuleJudge
from paritygate.spec.protocol import DIMENSIONS

__all__ = [
    "DIMENSIONS",
    "Answer",
    "Judge",
    "Judged",
    "Judgement",
    "ModelJudge",
    "RuleJudge",
    "agreement",
    "fenced",
    "parse_judgement",
]
