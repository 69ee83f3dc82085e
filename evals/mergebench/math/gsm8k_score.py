r"""Both of lm-eval's readings of an answer to GSM8K, without a second filter, and one of our own.

Patterns and comparison are those of `gsm8k_cot` in lm-eval 0.4.13. The third metric, `flexible`,
counts all that `exact_match_flexible` counts. It also reads an answer in a box, such as
`$\boxed{72}$.`, and one that is announced before more numbers.
"""

import re
from fractions import Fraction
from typing import Any

from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter

STRICT = RegexFilter(r"The answer is (\-?[0-9\.\,]+).")
FLEXIBLE = RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
NOT_COMPARED = [",", r"\$", r"(?s).*#### ", r"\.$"]

BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,!; ]|\{,\}|,)(?=\d{3}(?!\d))")
NUMBER = re.compile(r"((?:(?<!\d)-)?)(?:\\?\$\s*)?(\d+(?:\.\d+)?|\.\d+)")
ANNOUNCED = re.compile(
    r"(?:####|\banswer(?: is|:)|\\(?:boxed|fbox)\s*\{(?:[^{}=]*=)*)"
    rf"(?:(?!\\boxed|\\fbox)\D){{0,40}}?{NUMBER.pattern}",
    re.IGNORECASE,
)


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    target = doc["answer"].split("####")[-1].strip()
    lm_eval, other = _matches(FLEXIBLE, results[0], target), _number(results[0])
    return {
        "score": lm_eval,
        "exact_match_strict": _matches(STRICT, results[0], target),
        "exact_match_flexible": lm_eval,
        "flexible": max(lm_eval, float(other is not None and other == _number(target))),
    }


def _number(text: str) -> Fraction | None:
    """The last number that is in a box or announced, else the last one."""
    text = BETWEEN_DIGITS.sub("", text)
    found = ANNOUNCED.findall(text) or NUMBER.findall(text)
    return Fraction("".join(found[-1])) if found else None


def _matches(reading: RegexFilter, response: str, target: str) -> float:
    """1.0 or 0.0."""
    ((found,),) = reading.apply([[response]], [{}])
    verdict = exact_match_hf_evaluate(
        [found], [target], regexes_to_ignore=NOT_COMPARED, ignore_case=True
    )
    return float(verdict["exact_match"])
