"""Java sources as tokens, classes, methods and assertions, to compare tests. No compiler, no I/O.

Two versions of a test file are compared by their assertions, not by their format. Comments and white space are not tokens, and
`Assert.assertEquals` is the same as `assertEquals`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<skip>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<literal>\"\"\".*?(?<!\\)\"\"\"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'
        |0[xX][0-9a-fA-F_.pP+-]*[lLfFdD]?|0[bB][01_]+[lL]?|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?[lLfFdD]?)
  | (?P<word>[A-Za-z_$][\w$]*)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_TYPES = frozenset({"class", "interface", "enum", "record"})
_TESTS = frozenset({"Test", "ParameterizedTest", "RepeatedTest", "TestFactory", "TestTemplate", "Theory"})
_BRANCHES = frozenset({"if", "return", "try", "while", "for", "switch", "break", "continue", "throw", "?"})
_CONSTANTS = frozenset({"true", "false", "null"})
# Calls that look like a method's declaration but are not one.
_NO_METHODS = frozenset(
    {"if", "for", "while", "switch", "catch", "synchronized", "try", "return", "new", "throw", "assert"}
)
_ASSERTS = re.compile(r"assert\w*|fail|verify\w*|expect\w*")
_TURNED_OFF = re.compile(r"Ignore|Disabled\w*|Enabled\w*")
_ASSUMPTION = re.compile(r"assum(?:e|ing)\w*")
_QUALIFIERS = frozenset({"Assert", "Assertions", "org", "junit", "jupiter", "api"})


def tokens(source: str) -> list[str]:
    """The tokens of a Java source, without comments and white space."""
    return [match[0] for match in _TOKEN.finditer(source) if match.lastgroup != "skip"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method with a body. ``owner`` is the class as the compiler names it: `a.b.Outer$Inner`.

    ``annotations`` are those of the method and of the classes around it, each as text; ``extends`` the superclass of its class.
    """

    owner: str
    name: str
    annotations: tuple[str, ...]
    modifiers: frozenset[str]
    extends: str
    abstract_owner: bool
    arguments: tuple[str, ...]
    body: tuple[str, ...]

    @property
    def is_test(self) -> bool:
        """JUnit 4 and 5 and TestNG by annotation, JUnit 3 by name."""
        if any(_name(annotation) in _TESTS for annotation in self.annotations):
            return True
        return self.extends.endswith("TestCase") and self.name.startswith("test") and not self.arguments

    @property
    def statements(self) -> list[tuple[str, ...]]:
        """The body cut at `;`, `{` and `}`, without empty pieces."""
        out: list[tuple[str, ...]] = []
        piece: list[str] = []
        depth = 0
        for token in self.body:
            depth += (token == "(") - (token == ")")
            if token in "{}" or (token == ";" and depth <= 0):
                if piece:
                    out.append(tuple(piece))
                piece = []
                depth = 0
            else:
                piece.append(token)
        return [*out, tuple(piece)] if piece else out

    @property
    def assertions(self) -> list[tuple[str, ...]]:
        """The statements that assert something, and what `@Test(expected = ...)` asserts."""
        said = [tuple(_without_qualifiers(s)) for s in self.statements if _asserts(s)]
        expected = [("@", *tokens(a)) for a in self.annotations if _name(a) in _TESTS and "expected" in a]
        return said + expected

    @property
    def turned_off(self) -> Counter[str]:
        """Return the annotations and assumptions that prevent the method from running."""
        found = [a for a in self.annotations if _TURNED_OFF.fullmatch(_name(a))]
        found += [a for a in self.annotations if _name(a) in _TESTS and re.search(r"enabled = false", a)]
        found += [f"{t}()" for t, after in _pairs(self.body) if after == "(" and _ASSUMPTION.fullmatch(t)]
        return Counter(found)

    @property
    def branches(self) -> Counter[str]:
        """Return the words by which a body can skip its assertions."""
        return Counter(token for token in self.body if token in _BRANCHES)


def methods(source: str) -> list[Method]:
    """The methods with a body that a Java source declares, in order. Sources that do not parse give what was understood."""
    return list(_Reader(tokens(source)).read())


def top_level_types(source: str) -> list[str]:
    """The full names of the types that a source declares at its top."""
    found, depth, package = [], 0, ""
    seen = tokens(source)
    for i, token in enumerate(seen):
        depth += (token in "{(") - (token in "})")
        if token == "package" and depth == 0:
            package = _dotted(seen[i + 1 :])
        if depth == 0 and token in _TYPES and seen[i - 1 : i] != ["."] and i + 1 < len(seen) and _is_word(seen[i + 1]):
            found.append(f"{package}.{seen[i + 1]}" if package else seen[i + 1])
    return found


def weaker(before: str, after: str | None, *, must_change: bool) -> list[str]:
    """Return the tests that are weaker in the second version of a file.

    ``after`` is None for a deleted file. ``must_change``: the first version does not compile on the new Java. Then an assertion
    may call something else, but with the same kind, number of arguments and literals.
    """
    old = methods(before)
    if after is None:
        return [f"{m.owner}.{m.name} was deleted" for m in old if m.is_test]
    new: dict[tuple[str, str, int], list[Method]] = {}
    for method in methods(after):
        new.setdefault(_key(method), []).append(method)
    return [finding for method in old for finding in _weaker(method, new.get(_key(method), []), must_change)]


def _weaker(old: Method, candidates: list[Method], must_change: bool) -> Iterator[str]:
    name = f"{old.owner}.{old.name}"
    if not candidates:
        if old.is_test or old.assertions:
            yield f"{name} was deleted"
        return
    new = next((m for m in candidates if m.arguments == old.arguments), candidates[0])
    if old.is_test and not new.is_test:
        yield f"{name} is no test any more"
    if new.turned_off - old.turned_off:
        yield f"{name} was turned off: {', '.join(sorted(new.turned_off - old.turned_off))}"
    form = _shape if must_change else tuple[str, ...]
    lost = Counter(map(form, old.assertions)) - Counter(map(form, new.assertions))
    if lost:
        yield f"{name} lost an assertion: {' '.join(str(token) for token in next(iter(lost)))}"
    elif new.branches - old.branches and (old.assertions or old.is_test):
        yield f"{name} can skip its assertions: {', '.join(sorted(new.branches - old.branches))} was added"
    elif old.is_test and not old.assertions and len(new.statements) < len(old.statements):
        yield f"{name} does less than before"


def _shape(assertion: tuple[str, ...]) -> tuple[str, ...]:
    """Kind, number of arguments and literals of an assertion, whatever it calls."""
    kind = next((t for t in assertion if _ASSERTS.fullmatch(t)), assertion[0])
    depth = commas = 0
    for token in assertion:
        depth += (token in "([") - (token in ")]")
        commas += token == "," and depth == 1
    literals = [t for t in assertion if t in _CONSTANTS or t[0] in "\"'" or t[0].isdigit()]
    return kind, str(commas), *literals


def _key(method: Method) -> tuple[str, str, int]:
    return method.owner, method.name, method.arguments.count(",")


def _asserts(statement: Iterable[str]) -> bool:
    return any((after == "(" and _ASSERTS.fullmatch(t)) or t == "assert" for t, after in _pairs(statement))


def _without_qualifiers(statement: tuple[str, ...]) -> list[str]:
    out: list[str] = []
    for token in statement:
        if _ASSERTS.fullmatch(token):
            while len(out) >= 2 and out[-1] == "." and out[-2] in _QUALIFIERS:
                del out[-2:]
        out.append(token)
    return out


def _pairs(statement: Iterable[str]) -> Iterator[tuple[str, str]]:
    seen = [*statement, ""]
    return itertools.pairwise(seen)


def _name(annotation: str) -> str:
    """`org.junit.Test ( timeout = 5 )` is `Test`."""
    return annotation.partition(" ( ")[0].replace(" ", "").rpartition(".")[2]


def _is_word(token: str) -> bool:
    return token[0].isalpha() or token[0] in "_$"


def _dotted(seen: list[str]) -> str:
    end = next((i for i, token in enumerate(seen) if token != "." and not _is_word(token)), len(seen))
    return "".join(seen[:end])


class _Reader:
    """Walks the tokens once. A class body's members are read up to their `;` or their body."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen
        self.at = 0
        self.package = ""

    def read(self) -> Iterator[Method]:
        head: list[str] = []
        while self.at < len(self.seen):
            token = self.seen[self.at]
            if token == "{":
                yield from self._type(head, (), "")
                head = []
            elif token == ";":
                if head[:1] == ["package"]:
                    self.package = "".join(head[1:])
                head = []
                self.at += 1
            else:
                head.append(token)
                self.at += 1

    def _type(self, head: list[str], around: tuple[str, ...], outer: str) -> Iterator[Method]:
        """A type whose `{` is next. ``around``: the annotations of the types around it."""
        annotations, rest = _annotations(head)
        kind = next((i for i, t in enumerate(rest) if t in _TYPES), None)
        if kind is None or kind + 1 >= len(rest):
            self._skip()
            return
        name = rest[kind + 1]
        owner = f"{outer}${name}" if outer else f"{self.package}.{name}" if self.package else name
        extends = _dotted(rest[rest.index("extends") + 1 :]) if "extends" in rest else ""
        abstract = "abstract" in rest[:kind] or rest[kind] == "interface"
        inherited = (*around, *annotations)
        self.at += 1
        member: list[str] = []
        while self.at < len(self.seen) and self.seen[self.at] != "}":
            token = self.seen[self.at]
            if token == ";":
                member = []
                self.at += 1
            elif token == "{":
                own, bare = _annotations(member)
                if any(t in _TYPES and bare[i - 1 : i] != ["."] for i, t in enumerate(bare)) and "=" not in bare:
                    yield from self._type(member, inherited, owner)
                elif "=" not in bare and "(" in bare and _method_name(bare):
                    yield self._method(bare, (*inherited, *own), owner, extends, abstract)
                else:  # an initializer, or a field whose value has braces
                    self._skip()
                    if "=" in bare:
                        continue
                member = []
            else:
                member.append(token)
                self.at += 1
        self.at += 1

    def _method(
        self, head: list[str], annotations: tuple[str, ...], owner: str, extends: str, abstract: bool
    ) -> Method:
        opening = head.index("(")
        closing = _closing(head, opening)
        begin = self.at + 1
        self._skip()
        return Method(
            owner=owner,
            name=head[opening - 1],
            annotations=annotations,
            modifiers=frozenset(head[: opening - 1]),
            extends=extends,
            abstract_owner=abstract,
            arguments=tuple(head[opening + 1 : closing]),
            body=tuple(self.seen[begin : self.at - 1]),
        )

    def _skip(self) -> None:
        """Move from a `{` to after its `}`."""
        depth = 0
        while self.at < len(self.seen):
            depth += (self.seen[self.at] == "{") - (self.seen[self.at] == "}")
            self.at += 1
            if depth == 0:
                return


def _annotations(head: list[str]) -> tuple[list[str], list[str]]:
    """The annotations of a declaration, and the declaration without them."""
    found, rest, i = [], [], 0
    while i < len(head):
        if head[i] == "@" and i + 1 < len(head) and head[i + 1] != "interface":
            end = i + 2
            while end + 1 < len(head) and head[end] == ".":
                end += 2
            if end < len(head) and head[end] == "(":
                end = _closing(head, end) + 1
            found.append(" ".join(head[i + 1 : end]))
            i = end
        else:
            rest.append(head[i])
            i += 1
    return found, rest


def _closing(seen: list[str], opening: int) -> int:
    depth = 0
    for i in range(opening, len(seen)):
        depth += (seen[i] == "(") - (seen[i] == ")")
        if depth == 0:
            return i
    return len(seen)


def _method_name(head: list[str]) -> str | None:
    name = head[head.index("(") - 1] if head.index("(") else ""
    return name if name and _is_word(name) and name not in _NO_METHODS else None


def tests(sources: Mapping[str, str]) -> list[Method]:
    """The test methods of these sources (path to text)."""
    return [method for source in sources.values() for method in methods(source) if method.is_test]
