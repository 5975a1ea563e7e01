#!/usr/bin/env python3
"""Writes docs/options.md, every option of every part, from the public headers, which are the only source of its words; and from
the same words the tables in the cards of the optimizers and what help() shows in Python.

options_page.py check [ROOT]      prints what differs and exits with 1 where a file is not what the headers say
options_page.py write [ROOT]      writes them
options_page.py missing [ROOT]    names the options whose header says nothing of their meaning
options_page.py self-test [ROOT]  reads a small header and compares
"""
import difflib
import re
import sys
import textwrap
from pathlib import Path

from check_tree import LIBRARY, is_public
from header_options import ALONE, Tree, bare, listed, sentence

PAGE = "docs/options.md"
FIELDS = "optimizers/detail/option_fields.h"
HELP = "python/pacer/_option_help.py"
# The cards whose table of options is written here.
TABLES = {"fused-adam.md": "FusedAdamWOptions", "fused-lamb.md": "FusedLambOptions", "fused-sgd.md": "FusedSgdOptions",
          "fused-rmsprop.md": "FusedRmspropOptions", "muon.md": "MuonOptions",
          "schedule-free.md": "ScheduleFreeAdamWOptions",
          "onebit-adam.md": "OneBitAdamOptions", "onebit-lamb.md": "OneBitLambOptions", "onebit-muon.md": "OneBitMuonOptions"}
# The pages of parts whose name is not the name of a page.
CARDS = {
    "collectives.md": {"BucketOptions"},
    "communicator.md": {"CollectiveOptions"},
    "onebit-adam.md": {"CompressionOptions"},
    "sharding.md": {"ParameterShardsOptions", "ShardsOptions", "TrainingMemoryOptions"},
    "language-model.md": {"CausalLmOptions", "RotaryScaling", "SaveCausalLmOptions"},
    "transformer-layer.md": {"LayerNormLinearOptions", "LayerNormMlpOptions", "RmsNormOptions"},
    "lora.md": {"LoadAdapterOptions", "Nf4Options"},
    "fused-adam.md": {"FusedAdamWOptions"},
    "own-optimizer.md": {"OwnRuleOptions"},
    "schedule-free.md": {"ScheduleFreeAdamWOptions"},
    "session.md": {"BackwardOptions", "GradientAccumulationOptions", "GradientClippingOptions", "LossScaleRule", "ResumeOptions"},
    "schedules.md": {"BatchSchedule", "LearningRateScheduleOptions", "VaryOptions"},
    "validation.md": {"EarlyStoppingOptions"},
    "checkpoints.md": {"LoadWeightsOptions"},
    "pipeline.md": {"PipelineCosts", "PipelineSchedule"},
    "curriculum.md": {"LengthSchedule", "SequenceLengthOptions"},
}

INTRODUCTION = """# Options

Every option of every part, with its type, its default and what the header says of it. Setters have the option's name and
chain: `FusedAdamWOptions(3e-4).weight_decay(0.1)`. "Needed" is what has no default, "unset" an option that may stay without a
value. The cards say when to use what; this page is written from the headers by `tests/meta/options_page.py`, and a test
compares it.
"""


def cell(words):
    """Words for Markdown, in or out of a table; code between backticks stays."""
    parts = words.replace("|", r"\|").split("`")
    return "`".join(part if i % 2 else re.sub(r"<(?=[A-Za-z/])", r"\\<", part) for i, part in enumerate(parts))


def card_of(part, pages):
    """The page that CARDS names, else the one with the part's name: onebit-adam.md for OneBitAdamOptions; else nothing."""
    name = part.name.removesuffix("Options").lower()
    same = (page for page in pages if page.removesuffix(".md").replace("-", "") == name)
    return next((page for page, parts in CARDS.items() if part.name in parts), next(same, ""))


def section_of(tree, part, pages, missing):
    card = card_of(part, pages)
    lines = [f"### {part.name}", "", cell(tree.purpose(part)), ""]
    where = f"`{part.namespace}::{part.name}` in [`{part.header}`](../{part.header})"
    if users := listed(tree.users.get(part.name, [])):
        where += f", for {users}"
    lines += [where + (f". Explained in [{card}]({card})." if card else "."), ""]
    if part.constructors:
        made = [f"`{text}`" + (f" ({words.rstrip('.')})" if words else "") for text, words, _ in part.constructors]
        lines += [f"Made as {cell(' or '.join(made))}.", ""]
    for words, options in part.sections:
        if not options:
            continue
        if words:
            lines += [words, ""]
        lines += ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
        for option in options:
            meaning = tree.meaning(part, option)
            if not meaning or re.fullmatch(r"[<>]=? \d+\.", meaning):
                missing.append(f"{part.header}: {part.name}.{option['name']}")
            if not meaning:
                enum = bare(option["type"])
                where = f"[`{enum}`](#{enum.lower()})" if enum in tree.enums else f"[{card}]({card})" if card else ""
                meaning = f"See {where}." if where else ""
            kind = tree.type(part, option["type"])
            lines.append(f"| `{option['name']}` | {cell(kind)} | {cell(tree.default(part, option))} | {cell(meaning)} |")
        lines.append("")
    return lines


def page(tree, pages):
    """The page, and the options that no header explains."""
    missing = []
    lines = [INTRODUCTION]
    by_folder = {folder: [part for part in tree.parts.values() if part.header.startswith(folder + "/")] for folder in LIBRARY}
    for folder, parts in by_folder.items():
        if parts:
            lines.append(f"- {folder}: " + ", ".join(f"[{part.name}](#{part.name.lower()})" for part in parts))
    lines += ["- [every hook](#every-hook): what the constructors take", "- [choices](#choices): the values of each enumeration", ""]
    for folder, parts in by_folder.items():
        if parts:
            lines += [f"## {folder.capitalize()}", ""]
        for part in parts:
            lines += section_of(tree, part, pages, missing)
    text = "\n".join(lines)
    lines = ["## Every hook", "", "What a Session uses, and how each is made. Options structs are above.", ""]
    lines += ["| hook | made as | what it is |", "| --- | --- | --- |"]
    for hook in sorted(tree.hooks.values(), key=lambda part: part.name):
        made = [(declaration.replace("Impl", ""), words) for declaration, words, _ in hook.constructors]
        name = hook.name.replace("Impl", "")
        declarations = "<br>".join(f"`{declaration}`" for declaration, _ in made) or f"`{name}()`"
        words = " ".join([sentence(tree.openings[hook.header])] + [words for _, words in made if words])
        lines.append(f"| [`{name}`](../{hook.header}) | {declarations} | {cell(words)} |")
    lines += ["", "## Choices", ""]
    for name, (words, values) in sorted(tree.enums.items()):
        if f"(#{name.lower()})" not in text:
            continue
        lines += [f"### {name}", ""] + ([cell(words), ""] if words else [])
        if any(meaning for _, meaning in values):
            lines += ["| value | meaning |", "| --- | --- |"]
            lines += [f"| `{value}` | {cell(sentence(meaning))} |" for value, meaning in values] + [""]
        else:
            lines += [f"Values: {listed(value for value, _ in values)}.", ""]
    return text + "\n" + "\n".join(lines).rstrip() + "\n", missing


def with_table(tree, name, card):
    """The card with the table of this struct below "## Options"."""
    part = tree.parts[name]
    lines = ["| name | type | meaning | default |", "| --- | --- | --- | --- |"]
    for option in part.options().values():
        kind, default = tree.type(part, option["type"]).replace("(#", "(options.md#"), tree.default(part, option)
        lines.append(f"| `{option['name']}` | {cell(kind)} | {cell(tree.meaning(part, option))} | {cell(default)} |")
    table = "\n".join(lines) + "\n"
    return re.sub(r"(?<=\n)\| name \| type \| meaning \| default \|\n(?:\|.*\n)+", lambda _: table, card, count=1)


def is_of_optimizer(tree, part):
    return any(base.name in ("OptimizerOptionsOf", "StepOptionsOf") for base in tree.bases_of(part))


def optimizer_options(tree):
    """The options of each optimizer in a line, and what each means. `paged` is no option of a group."""
    names, meanings, enums = {}, {}, "|".join(tree.enums)
    for part in (part for part in tree.parts.values() if is_of_optimizer(tree, part)):
        options = {name: tree.meaning(part, option) for name, option in part.options().items() if name != "paged"}
        names[part.name.removesuffix("Options")] = " ".join(options)
        for name, words in options.items():
            of_python = re.sub(rf"\b(?:{enums})::(\w+)", r"'\1'", words).replace("::", ".")
            of_python = re.sub(r"\b(false|true): ", lambda found: found[0].capitalize(), of_python)
            assert meanings.setdefault(name, of_python) == of_python, f"{name} means one thing in all optimizers that have it"
    return names, meanings


def python_help(tree):
    """A module with both."""
    names, meanings = optimizer_options(tree)
    lines = ['"""The options of each optimizer and their meanings, as the headers have them. Written by tests/meta/options_page.py."""']
    for variable, items in (("NAMES", names), ("MEANINGS", meanings)):
        lines += ["", f"{variable} = {{"]
        for name, words in items.items():
            wrapped = textwrap.wrap(words, 100, drop_whitespace=False, break_on_hyphens=False)
            lines += [f'    "{name}":', *(f"        {piece!r}" for piece in wrapped)]
            lines[-1] += ","
        lines.append("}")
    return "\n".join(lines) + "\n"


def written(root):
    """Every file that is made of the headers: (path, text)."""
    tree, pages = read_tree(root)
    yield PAGE, page(tree, pages)[0]
    for card, name in TABLES.items():
        yield f"docs/{card}", with_table(tree, name, (root / "docs" / card).read_text(encoding="utf-8"))
    yield HELP, python_help(tree)


def read_tree(root):
    headers = []
    for folder in LIBRARY:
        paths = sorted(path for path in (root / folder).rglob("*.h") if is_public(root, path))
        headers += [(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in paths]
    return Tree(headers), sorted(path.name for path in (root / "docs").glob("*.md"))


def check(root):
    tree, pages = read_tree(root)
    for path, text in written(root):
        there = (root / path).read_text(encoding="utf-8") if (root / path).exists() else ""
        differences = list(difflib.unified_diff(there.split("\n"), text.split("\n"), path, "the headers", lineterm="", n=0))
        if differences:
            yield "\n".join(differences[:20])
            yield f"{path}: is not what the headers say; run python3 tests/meta/options_page.py write"
    for part in tree.parts.values():
        if card_of(part, pages) not in pages:
            yield f"{part.header}: no page explains {part.name}; name one in CARDS of tests/meta/options_page.py"
    for header, count in tree.unread.items():
        yield f"{header}: {count} TORCH_ARG or PACER_OPTION could not be read; write them like the others, or teach tests/meta/header_options.py"
    fields = (root / FIELDS).read_text(encoding="utf-8")
    for name in optimizer_options(tree)[1]:
        if f'{{"{name}"' not in fields:
            yield f"{FIELDS}: lacks the option {name}, which would be neither saved nor compared"
    for name in sorted(ALONE - {name for part in tree.parts.values() for name in part.alone}):
        yield f"tests/meta/header_options.py: {name} in ALONE has a comment of its own now, or is gone"


def write(root):
    for path, text in written(root):
        (root / path).write_text(text, encoding="utf-8")
    return ()


def missing(root):
    return page(*read_tree(root))[1]


HEADER = """// What it\n// is for. And more.
namespace pacer {
// How.\nenum class Way {\n  fast,  // a loop,\n         // unrolled\n  slow,  // another\n};
struct TestOptions {
  TestOptions(int64_t size) : size_(size) {}
  // Elements,\n  // >= 1.
  TORCH_ARG(int64_t, size);
  TORCH_ARG(std::optional<int64_t>, bytes) = int64_t{2} << 20;  // of all | none

  TORCH_ARG(Way, way) = Way::fast;
  TORCH_ARG(std::vector<std::string>, names);
};
class OtherOptions {
 public:
  // As in TestOptions; here, too.\n  OtherOptions& size(int64_t n);
  // See TestOptions::bytes.\n  OtherOptions& bytes(int64_t n);
  // Both.\n  OtherOptions& a(double a);\n  OtherOptions& b(double b);
  // Least, 8 unless set.\n  OtherOptions& least(int64_t n) { return *this; }

 private:\n  OtherOptions& become(int n);\n  double a_ = 1, b_ = 2;\n  std::optional<int64_t> least_;
};
template <class Own>\nstruct SharedOptionsOf : public Base<Own> {
  // Shared.\n  PACER_OPTION(double, rate) = 1e-3;
  PACER_OPTION(double, decay) = 0;
 private:\n  TestOptions test_;\n public:
  PACER_OPTION_OF(Own, test_, bytes);
};
struct DerivedOptions : public SharedOptionsOf<DerivedOptions>,
                        public Base<DerivedOptions> {
  DerivedOptions(double r = 1e-3) { rate(r).decay(0.1); }
  // Own.\n  TORCH_ARG(bool, own) = true;
};
class Test {\n public:\n  explicit Test(const TestOptions& options);\n};
}
"""
EXPECTED = """What it is for.
`pacer::TestOptions` in [`modules/test.h`](../modules/test.h), for `Test`. Explained in [te-st.md](te-st.md).
Made as `TestOptions(int64_t size)`.
| `size` | `int64_t` | needed | Elements, >= 1. |
| `bytes` | `int64_t`, or unset | 2 MiB | Of all \\| none. |
| `way` | [`Way`](#way) | `Way::fast` | How. |
| `names` | list of string | empty | See [te-st.md](te-st.md). |
| `size` | `int64_t` | needed | Elements, >= 1. Here, too. |
| `bytes` | `int64_t` | 2 MiB | Of all \\| none. |
| `a` | `double` | `1` | Both. |
| `b` | `double` | `2` | Both. |
| `least` | `int64_t` | `8` | Least, 8 unless set. |
| `rate` | `double` | `1e-3` | Shared. |
| `decay` | `double` | `0.1` | Shared. |
| `own` | `bool` | `true` | Own. |
| `fast` | A loop, unrolled. |
| `slow` | Another. |
"""


def self_test(_):
    text, unsaid = page(Tree([("modules/test.h", HEADER)]), ["other.md", "te-st.md"])
    for line in EXPECTED.splitlines():
        if f"\n{line}\n" not in text:
            yield f"the page of the header lacks: {line}"
    card = with_table(Tree([("modules/test.h", HEADER)]), "TestOptions", "\n| name | type | meaning | default |\n| old |\n\nmore")
    if "old" in card or "| `way` | [`Way`](options.md#way) | How. | `Way::fast` |\n" not in card or "\n\nmore" not in card:
        yield f"writes the table of a card wrongly: {card}"
    if unsaid != ["modules/test.h: TestOptions.names"] or "become" in text:
        yield f"names as without a meaning: {unsaid}"
    changed, _ = page(Tree([("modules/test.h", HEADER.replace("2} << 20", "3} << 20"))]), [])
    if "3 MiB" not in changed:
        yield "does not notice a default that changed"
    if Tree([("modules/test.h", HEADER.replace("TORCH_ARG(Way, way)", "TORCH_ARG(Way,\n way)"))]).unread:
        yield "does not read an option in two lines"
    if not Tree([("modules/test.h", HEADER.replace("struct TestOptions {", "struct TestOptions\n{"))]).unread:
        yield "does not notice a struct that it does not read"


RULES = {"check": check, "write": write, "missing": missing, "self-test": self_test}


def main(rule, root="."):
    problems = list(RULES[rule](Path(root).resolve()))
    for problem in problems:
        print(problem)
    return 1 if problems and rule != "missing" else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
