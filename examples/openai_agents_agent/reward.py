"""The reward of a word problem: 1 if the reply ends with `#### N` and N is the answer. GSM8K's solutions have this form.

The **strict** reward accepts `####` and a number. It understands signs, currency, thousands separators, decimals, fractions,
percent signs, units and emphasis. Several marked numbers that differ are not an answer. The **lenient** reward also accepts a
number in a box, after "the answer is", or at the end of the last line, and the last of several marks. Numbers are compared
exactly, as fractions.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from agentcore_rl_toolkit import RewardFunction

LONGEST = 60  # characters of a number. A longer number is not an answer.
LOOKED_AT = 20_000  # characters at the end of a reply
_EXPONENT = 30
_SCALES = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MARK = re.compile(r"(?<!#)####(?!#)")
_ANY_MARK = re.compile(r"#{4,}")
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"))
_CURRENCY = r"(?:US\$|USD|EUR|GBP|Rs\.?|[$€£¥₹₩])"
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d+)?|\.\d+)"
_SCIENTIFIC = r"(?:[eE][+-]?\d{1,3})"
_NUMBER = re.compile(
    rf"(?P<sign>(?:[+-]\s?)?)(?:{_CURRENCY}\s?)?(?P<minus>-?)"
    rf"(?:(?P<mixed>\d+)\s+(?P<top>\d+)/(?P<bottom>\d+)|(?P<over>{_WHOLE})\s?/\s?(?P<under>{_WHOLE})"
    rf"|(?P<decimal>{_DECIMAL})(?P<exponent>{_SCIENTIFIC})?)"
    r"(?:\s?(?P<scale>(?:hundred|thousand|million|billion|trillion)\b|[kK]\b))?"
)
# Text after a number that shows that it is not one: another digit group, a second decimal point, a clock, a ratio.
_BROKEN = re.compile(r"[.,:/]\d|\d|[eE][+-]?\d")
# Text before a number that shows that it is a part of a name, or of a longer number.
_INSIDE = re.compile(r"(?:[A-Za-z_^]|\d[.,:/]?)\Z")
_HEDGE = re.compile(r"\s*(?:or|and|to|vs\.?|nor|[-,;/&|~])?\s*[-+$€£]?\s?\d", re.IGNORECASE)
_ANNOUNCED = re.compile(r"\b(?:final answer|answer|result|total)\b\s*(?:is|are|was|=|:|equals)+\s*", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]{0,99}\}){0,99})\}")


class AnswerReward(RewardFunction):
    """Return 1.0 if the reply has the expected answer, otherwise 0.0. Raises: ValueError if ``answer`` is not a number."""

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict

    def __call__(self, *, response_text: str, answer: str, prompt: str = "") -> float:
        expected = parse_number(answer)
        if expected is None:
            raise ValueError(f"the expected answer must be a number, got {answer!r}")
        found = strict_answer(response_text) if self.strict else lenient_answer(response_text, prompt)
        return float(found == expected)


def strict_answer(text: str) -> Fraction | None:
    """Return the number after `####`. None if it is missing, is not alone on its line, or differs from another marked number."""
    marked = [_alone(line) for line in _marked(_plain(text), _MARK)]
    return marked[0] if marked and all(value == marked[0] for value in marked) else None


def lenient_answer(text: str, prompt: str = "") -> Fraction | None:
    """Return the number after the last mark, in a box, after "the answer is", or at the end of the last line with a number.

    ``prompt`` is the question. If the reply repeats it, its numbers are ignored.
    """
    plain, question = _plain(text), _plain(prompt).strip()
    if question:
        plain = plain.replace(question, "\n")
    for line in reversed(_marked(plain, _ANY_MARK)):
        if line.strip():
            return _first(line)
    boxes = _BOXED.findall(text[-LOOKED_AT:])
    if boxes:
        return _first(_plain(boxes[-1]))
    announced = list(_ANNOUNCED.finditer(plain))
    if announced:
        value = _first(plain[announced[-1].end() :].split("\n")[0])
        if value is not None:
            return value
    for line in reversed(plain.split("\n")):
        numbers = _numbers(line.rpartition("=")[2]) or _numbers(line)
        if numbers:
            return numbers[-1][0]
    return None


def parse_number(text: str) -> Fraction | None:
    """Return the number in a text that contains one number and nothing else. Otherwise None."""
    return _alone(_plain(text))


def _marked(text: str, mark: re.Pattern[str]) -> list[str]:
    """Return the text after each mark, up to the end of its line or the next mark."""
    return [text[m.end() :].split("\n")[0].split("####")[0] for m in mark.finditer(text)]


def _alone(line: str) -> Fraction | None:
    """Return the number at the beginning of a line, if the line has no other number."""
    numbers = _numbers(line)
    if len(numbers) != 1:
        return None
    value, begin, end = numbers[0]
    return value if not line[:begin].strip() and not re.search(r"\d", _without_powers(line[end:])) else None


def _first(line: str) -> Fraction | None:
    """Return the number after the last `=` of a line, or its first number. None if the line offers two numbers."""
    line = line.rpartition("=")[2] if _numbers(line.rpartition("=")[2]) else line
    line = re.sub(r"\([^()]*\)", " ", line) if _numbers(re.sub(r"\([^()]*\)", " ", line)) else line
    numbers = _numbers(line)
    if not numbers or _HEDGE.match(line[numbers[0][2] :].lstrip(" %")):
        return None
    return numbers[0][0]


def _numbers(line: str) -> list[tuple[Fraction, int, int]]:
    """Return (value, begin, end) of every number in a line, from left to right."""
    found = []
    for match in _NUMBER.finditer(line):
        begin, end = match.span()
        if len(match[0]) > LONGEST or _INSIDE.search(line[:begin]) or _BROKEN.match(line[end:]):
            continue
        value = _value(match)
        if value is not None:
            found.append((value, begin, end))
    return found


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    try:
        if part["mixed"]:
            value = int(part["mixed"]) + Fraction(int(part["top"]), int(part["bottom"]))
        elif part["over"]:
            value = Fraction(_whole(part["over"]), _whole(part["under"]))
        else:
            exponent = int((part["exponent"] or "e0")[1:])
            if abs(exponent) > _EXPONENT:
                return None
            value = Fraction(part["decimal"].replace(",", "")) * Fraction(10) ** exponent
    except ZeroDivisionError:
        return None
    negative = (part["sign"].strip() == "-") != (part["minus"] == "-")
    return (-value if negative else value) * _SCALES.get((part["scale"] or "").lower(), 1)


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _without_powers(text: str) -> str:
    """Remove the digits of units such as m2 and m^2."""
    return re.sub(r"[A-Za-z]\^?\d", "", text)


def _plain(text: str) -> str:
    """Return the end of a text without markup, with one kind of minus and of fractions."""
    text = text[-LOOKED_AT:].translate(_DASHES)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}", r" \1/\2", text)
    if not text.isascii():
        text = "".join(c if c.isascii() else _written_out(c) for c in text)
        text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    text = re.sub(r"\\(?:boxed|text|mathrm|mathbf)\s*\{([^{}]*)\}", r" \1 ", text)
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\%", "%").replace("\\$", "$")
    return re.sub(r"[*`{}\\]|(?<!\d)_|_(?!\d)|\$(?=\s*$|\s*[.,;]?\s*\n)", "", text)


def _written_out(character: str) -> str:
    """Write fractions such as ½ with digits. Leave out spaces that group digits, and marks without a width."""
    if character in "\u00a0\u202f\u2009\u200b\u200c\u200d\u2060\ufeff":
        return "" if character != "\u00a0" else " "
    if unicodedata.category(character) == "No" and unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if unicodedata.category(character) == "No":  # a superscript: m² is a unit
        return ""
    return character
