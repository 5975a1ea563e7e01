"""Makes mutants of a file, and one text of the file that holds them all: each is chosen while the program runs
(mutant schemata: Untch, Offutt and Harrold, ISSTA 1993), so that one compilation serves hundreds of them."""

import re
from dataclasses import dataclass, field

from source import Source

SWAPS = {
    "+": "-", "-": "+", "*": "/", "/": "*", "%": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=",
    "!=": "==", "&&": "||", "||": "&&", "&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<",
}  # fmt: skip
ASSIGNED = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", ">>=": "<<=", "<<=": ">>="}
CALLS = {"mul_": "div_", "div_": "mul_", "min": "max", "max": "min", "any_of": "all_of", "all_of": "any_of"}
NEGATED = {"<": ">=", ">": "<=", "<=": ">", ">=": "<"}
NOT_EXPRESSIONS = {"return", "using", "delete", "goto", "else", "do", "try", "if", "for", "while", "switch", "case"}


@dataclass
class Mutant:
    file: str
    operator: str
    start: int  # of the range that is exchanged
    end: int
    new: str  # what stands there instead
    statement: bool
    line: int
    line_text: str
    place: int  # which occurrence of the operator on its line
    number: int = 0
    meaning: str = ""

    @property
    def key(self):
        if self.meaning:
            return f"{self.file} | {self.line_text} | by hand | {self.meaning}"
        return f"{self.file} | {self.line_text} | {self.operator} | {self.place}"


class Generator:
    def __init__(self, file, text):
        self.file = file
        self.source = Source(text)
        self.mutants = []
        self.counts = {}

    def run(self):
        self._binary()
        self._unary()
        self._literals()
        self._calls()
        self._dropped()
        return sorted(self.mutants, key=lambda m: (m.start, m.end))

    def _add(self, operator, at, region, new, statement=False):
        line, text = self.source.line_of(at)
        place = self.counts[line, operator] = self.counts.get((line, operator), 0) + 1
        self.mutants.append(Mutant(self.file, operator, *region, new, statement, line, text, place))

    def _exchange(self, operator, start, end, new, stops_at_assignment=True):
        """The expression around a range, with the range exchanged."""
        if self.source.is_ignored(start):
            return
        region = self.source.expression(start, end, stops_at_assignment)
        if region:
            left, right = region
            pieces = self.source.plain(left, start), new, self.source.plain(end, right)
            self._add(operator, start, region, re.sub(r" +", " ", " ".join(pieces)))

    def _binary(self):
        for match in re.finditer(r"(?<=[\w)\]}]) ([-+*/%<>&|^]|[<>=!]=|&&|\|\||<<|>>)(?=\s)", self.source.code):
            old = match[1]
            beside = self.source.code[match.start() - 2 : match.start()], self.source.code[match.end() :].lstrip()[:2]
            if old == "+" and "SS" in beside:
                continue  # texts are joined
            for new in {SWAPS[old], NEGATED.get(old, SWAPS[old])}:
                self._exchange(f"{old} to {new}", match.start(1), match.end(1), new)
        for match in re.finditer(r" ([-+*/|&]=|>>=|<<=) ", self.source.code):
            new = ASSIGNED[match[1]]
            if re.match(r"\s*(\w*text\w*|SS|k\w*Digits)", self.source.code[match.end() :]):
                continue  # texts are joined
            self._exchange(f"{match[1]} to {new}", match.start(1), match.end(1), new, stops_at_assignment=False)

    def _unary(self):
        for match in re.finditer(r"(?<=[(\s,!])!(?=[\w(:])", self.source.code):
            self._exchange("dropped !", match.start(), match.end(), "")
        for match in re.finditer(r"(?<=[(\s,])-(?=[a-z_(])", self.source.code):
            self._exchange("dropped sign", match.start(), match.end(), "")
        for match in re.finditer(r"(?<![\w.])fma_\((?=[\w(])", self.source.code):
            self._exchange("sign of a product", match.end(), match.end(), "-")
        for match in re.finditer(r"\b(true|false)\b", self.source.code):
            self._exchange("true and false", *match.span(), "false" if match[0] == "true" else "true")

    def _literals(self):
        for match in re.finditer(r"(?<![\w.'])(?<!p[-+])(\d+)(\.\d+)?((?:e[-+]?\d+)?[uUfFlL]*)(?![\w.'])", self.source.code):
            if re.search(r"\bvirtual\b.* = $", self.source.code[: match.start()].rsplit(";", 1)[-1], re.S):
                continue  # a pure virtual function
            whole, fraction, suffix = match.groups()  # with its exponent
            if re.fullmatch(r"0\d+", whole):
                new = f"0{int(whole, 8) + 1:o}"
            else:
                new = f"{int(whole) + 1}{fraction or ''}{suffix}"
            if not self.source.is_ignored(match.start()):
                self._add("literal + 1", match.start(), match.span(), new)

    def _calls(self):
        for match in re.finditer(r"(?<![\w.])(?:std::)?(mul_|div_|min|max|any_of|all_of)(?=[(<])", self.source.code):
            self._exchange(f"{match[1]} to {CALLS[match[1]]}", *match.span(1), CALLS[match[1]])

    def _dropped(self):
        place = r"[-+*(]*\w+(?:(?:::|\.|->)~?\w+|\[[^\]]*\]|<[\w:, ]+>|\(.*\))*\)?"
        expression = re.compile(rf"(?:{place}|{place} (?:[-+*/|&^]|<<|>>)?= .*|{place}(?:\+\+|--))\s*;", re.S)
        for start, end in self.source.statements():
            code = self.source.code[start:end]
            first = re.match(r"\w*", code)[0]
            leaves = re.match(r"(throw\b|continue;|break;|return;)", code)
            if ".reserve(" in code:
                continue
            if leaves or (first not in NOT_EXPRESSIONS and expression.fullmatch(code)):
                operator = f"dropped {leaves[1].strip(';')}" if leaves else "dropped statement"
                self._add(operator, start, (start, end), "", statement=True)


def by_hand(entry, text):
    """The Mutant of one entry of by_hand.json. Raises ValueError where the old text is not found exactly once."""
    found = text.count(entry["old"])
    if found != 1:
        raise ValueError(f"{entry['file']}: found {found} times, not once: {entry['old']}")
    start = text.index(entry["old"])
    source = Source(text)
    line, line_text = source.line_of(start)
    region = start, start + len(entry["old"])
    statement = entry["old"].endswith((";", "}"))
    place = *region, entry["new"], statement, line, line_text, 1
    return Mutant(entry["file"], "by hand", *place, meaning=entry["meaning"])


@dataclass
class _Node:
    start: int
    end: int
    mutants: list = field(default_factory=list)
    children: list = field(default_factory=list)


def _tree(mutants, length):
    """Nests the ranges. Returns the root, and leaves out what overlaps another one in part."""
    root, left_out = _Node(0, length), []
    for mutant in sorted(mutants, key=lambda m: (m.start, -m.end, not m.statement, m.operator != "by hand")):
        node = root
        while node.children and node.children[-1].end > mutant.start:
            node = node.children[-1]
        if mutant.end > node.end:
            left_out.append(mutant)
        elif node is not root and (node.start, node.end) == (mutant.start, mutant.end) and (
            node.mutants[0].statement == mutant.statement
        ):
            node.mutants.append(mutant)
        else:
            node.children.append(_Node(mutant.start, mutant.end, [mutant]))
    return root, left_out


def _written(node, text):
    pieces, place = [], node.start
    for child in node.children:
        pieces += [text[place : child.start], _written(child, text)]
        place = child.end
    inner = "".join(pieces) + text[place : node.end]
    for mutant in reversed(node.mutants):
        chosen = f"\npacer_mutant_is({mutant.number})"
        new = " ".join(mutant.new.split())
        if mutant.statement:
            inner = f"{{ if ({chosen}) {{ {new} }} else {{ {inner} }} }}"
        else:
            inner = f"({chosen} ? ({new}) : ({inner}))"
    return inner


def schemata(text, mutants):
    """The text with all mutants in it, by their numbers, and the mutants that had to be left out."""
    root, left_out = _tree(mutants, len(text))
    return _written(root, text), left_out


def numbers_at(written, line):
    """The mutant that the compiler means by an error in this line: on it, or the last one before it."""
    lines = written.split("\n")
    for at in range(min(line, len(lines)) - 1, -1, -1):
        found = re.match(r"pacer_mutant_is\((\d+)\)", lines[at])
        if found:
            return int(found[1])
    return None
