"""Reads C++ well enough to find what can be mutated: what is code, which brackets belong together, where an
expression and a statement begin and end. It relies on the tree's clang-format style (a binary operator has
spaces around it, a template's bracket has none), not on a parser."""

import re

CLOSING = {"(": ")", "[": "]", "{": "}"}
# Calls whose arguments are text for people; of the first kind all but the condition.
MESSAGE_AFTER_CONDITION = r"(?:require)(?:<\w+>)?"
MESSAGE = r"(?:throw [\w:]+|fail\w*|concatenate|warn\w*|TORCH_WARN\w*|print\w*|fprintf)"
CONTROL = r"\b(?:if|for|while|switch|if constexpr)$"
ASSIGNMENT = re.compile(r" (?:[-+*/%&|^]|<<|>>)?= ")


def _blank(text, start, end, filler=" "):
    return text[:start] + re.sub(r"[^\n]", filler, text[start:end]) + text[end:]


def without_text(source):
    """The source with comments as spaces, strings as letters, and preprocessor lines and code for devices only
    as spaces, every other character at its place."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'(?!\w)', re.S)
    place = 0
    while match := token.search(source, place):
        if match[0][0] == "'" and source[match.start() - 1].isalnum():  # a separator of digits
            place = match.start() + 1
            continue
        source = _blank(source, *match.span(), " " if match[0][0] == "/" else "S")
        place = match.end()
    for_device = re.compile(r"^#if defined\(__CUDA_ARCH__\).*?(?=^#else|^#endif)", re.S | re.M)
    for match in for_device.finditer(source):
        source = _blank(source, *match.span())
    for match in re.finditer(r"^[ ]*#(?:[^\n]*\\\n)*[^\n]*", source, re.M):
        source = _blank(source, *match.span())
    return source


class Source:
    """One file: `code` is what without_text left of `text`; `match` joins each bracket with its partner."""

    def __init__(self, text):
        self.text = text
        self.code = without_text(text)
        self.match = {}
        self._pair_brackets()
        self.kind = {at: self._kind_of_brace(at) for at, c in enumerate(self.code) if c == "{"}
        self.ignored = bytearray(len(self.code))
        for start, end in self._ignored():
            self.ignored[start:end] = b"\1" * (min(end, len(self.code)) - start)
        self.inside = self._innermost()

    def _pair_brackets(self):
        stack = []
        for at, c in enumerate(self.code):
            if c in "([{":
                stack.append(at)
            elif c == "<" and re.match(r"\w<(?![ <=])", self.code[at - 1 : at + 2]):
                stack.append(at)
            elif c in ")]}":
                while stack and self.code[stack[-1]] == "<":
                    stack.pop()
                if stack:
                    self._pair(stack.pop(), at)
            elif c == ">" and stack and self.code[stack[-1]] == "<" and self.code[at - 1] not in "- ":
                self._pair(stack.pop(), at)

    def _pair(self, opening, closing):
        self.match[opening], self.match[closing] = closing, opening

    def _kind_of_brace(self, at):
        """'scope' (of a class or namespace), 'body' (of a function or a loop) or 'value'."""
        start = max(self.code.rfind(c, 0, at) for c in ";{}")
        before = self.code[start + 1 : at].strip()
        if re.search(r"\b(namespace|class|struct|union|enum|extern)\b", before) and not before.endswith(")"):
            return "enum" if re.search(r"\benum\b", before) else "scope"
        if re.search(r"(^|\)|\belse|\bdo|\btry|\bconst|\bnoexcept|\boverride|\bmutable|[})])$", before) and (
            before or self._opens_block(at)
        ):
            return "body"
        return "body" if re.search(r"\) -> [\w:<>]+$", before) else "value"

    def _opens_block(self, at):
        return self.code[:at].rstrip()[-1:] in (";", "}", "{", ")")

    def _innermost(self):
        """For each place, the opening brace around it."""
        inside, stack = [], []
        for at, c in enumerate(self.code):
            if c == "}" and stack:
                stack.pop()
            inside.append(stack[-1] if stack else -1)
            if c == "{":
                stack.append(at)
        return inside

    def _ignored(self):
        """Ranges in which no operator is touched."""
        ranges = []
        for match in re.finditer(r"\b" + MESSAGE_AFTER_CONDITION + r"\(", self.code):
            opening = match.end() - 1
            comma = self._next_comma(opening + 1)
            if comma and opening in self.match:
                ranges.append((comma, self.match[opening]))
        for match in re.finditer(r"\b" + MESSAGE + r"\(", self.code):
            if match.end() - 1 in self.match:
                ranges.append((match.end(), self.match[match.end() - 1]))
        for match in re.finditer(r"\breserve\(", self.code):  # changes how fast it is, not what it does
            ranges.append((match.start(), self.match.get(match.end() - 1, match.end())))
        for match in re.finditer(r"\b(static_assert|if constexpr|alignas|noexcept|decltype|sizeof) ?\(", self.code):
            ranges.append((match.start(), self.match.get(match.end() - 1, match.end())))
        for match in re.finditer(r"\b(?:constexpr|using|template|typedef|friend|case|operator)\b[^;{}:]*", self.code):
            if "(" not in match[0] or match[0].startswith(("template", "using", "case", "operator")):
                ranges.append(match.span())
        for match in re.finditer(r"^ *#pragma omp [^\n]*\n\s*for \(", self.text, re.M):  # whose form is prescribed
            ranges.append((match.end(), self.match.get(match.end() - 1, match.end())))
        for at, kind in self.kind.items():
            if kind == "enum":
                ranges.append((at, self.match.get(at, at)))
        for opening, closing in self.match.items():
            if self.code[opening] == "<" and opening < closing:
                ranges.append((opening, closing))
        for match in re.finditer(r"^ *(?!return|else)(?:alignas\(\w+\) )?[\w:]+ \w+\[[^\]\n]*\]", self.code, re.M):  # its size
            ranges.append(match.span())
        # A table of constants: a value in braces behind constexpr.
        for match in re.finditer(r"\bconstexpr [^;(]*= ?\{", self.code):
            ranges.append((match.start(), self.match.get(match.end() - 1, match.end())))
        return ranges

    def _next_comma(self, at):
        while at < len(self.code) and self.code[at] not in ")]}":
            if self.code[at] == ",":
                return at
            at = self.match.get(at, at) + 1
        return None

    def is_ignored(self, at):
        return bool(self.ignored[at])

    def expression(self, start, end, stops_at_assignment=True):
        """The largest expression around [start, end) that is complete, or None."""
        left, right = start, end
        while left > 0:
            c = self.code[left - 1]
            if c in "([{,;" or (c == "<" and left - 1 in self.match):
                break
            if c in ")]}>" and left - 1 in self.match:
                opening = self.match[left - 1]
                if c == "}" and self.kind.get(opening) != "value":
                    break
                if c == ")" and re.search(CONTROL, self.code[:opening].rstrip()[-14:]):
                    break
                left = opening
                continue
            if re.search(r"\b(return|throw|else|do|case|co_return)\b$", self.code[max(0, left - 9) : left]) and (
                not self.code[left].isalnum() and self.code[left] != "_"
            ):
                break
            if stops_at_assignment and ASSIGNMENT.fullmatch(self.code[self.code.rfind(" ", 0, left) : left + 1]):
                break
            left -= 1
        while right < len(self.code):
            c = self.code[right]
            if c in ")]},;" or (c == ">" and right in self.match):
                break
            if c in "([{" or (c == "<" and right in self.match):
                if c == "{" and self.kind.get(right) != "value":
                    return None
                right = self.match.get(right, right)
            right += 1
        while left < start and self.code[left].isspace():
            left += 1
        while right > end and self.code[right - 1].isspace():
            right -= 1
        whole = self.code[left:right]
        if not whole or "#" in self.text[left:right] or re.search(r"[(,= ]\[[&=\w, ]*\]\s*[({]|^\[|;", whole):
            return None
        if re.match(r"(const|auto|static|int64_t|size_t|float|double|bool|char|uint\w+|std::\w+ \w)\b", whole):
            return None
        return left, right

    def statements(self):
        """(start, end) of each statement of a function's body that ends in a semicolon."""
        for match in re.finditer(r"[;{})]|\belse\b", self.code):
            at = match.start()
            if match[0] == ")" and not re.search(CONTROL, self.code[: self.match.get(at, 0)].rstrip()[-14:]):
                continue
            if match[0] == "{" and self.kind[at] != "body":
                continue
            start = match.end() + len(self.code[match.end() :]) - len(self.code[match.end() :].lstrip())
            brace = self.inside[start] if start < len(self.code) else -1
            if brace < 0 or self.kind[brace] != "body" or self._in_parentheses(start, brace):
                continue
            end = start
            while end < len(self.code) and self.code[end] not in ";}":
                end = self.match.get(end, end) + 1 if self.code[end] in "([{" else end + 1
            if end < len(self.code) and self.code[end] == ";":
                yield start, end + 1

    def _in_parentheses(self, at, brace):
        place = brace + 1
        while place < at:
            if self.code[place] in "([{":
                closing = self.match.get(place, place)
                if closing >= at:
                    return True
                place = closing
            place += 1
        return False

    def plain(self, start, end):
        """The text of a range on one line, without comments."""
        kept = "".join(t if c != " " or t == " " else " " for c, t in zip(self.code[start:end], self.text[start:end]))
        return re.sub(r"\s*\n\s*", " ", kept).strip()

    def line_of(self, at):
        start = self.text.rfind("\n", 0, at) + 1
        end = self.text.find("\n", at)
        return self.text.count("\n", 0, at) + 1, self.text[start : end if end >= 0 else None].strip()
