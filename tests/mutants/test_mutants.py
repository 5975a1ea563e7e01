#!/usr/bin/env python3
"""Tests of the mutation testing itself, without building pacer: test_mutants.py [COMPILER...]"""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import mutate
import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = ["c++"]

PROGRAM = """#include <cstdio>
int clamped(int value, bool cut) {  // value + 1
  if (cut && value > 9) value = 9;
  return value - 1;
}
int main() { std::printf("%d %d", clamped(9 + 3, true), clamped(20, false)); }
"""


def of(text):
    return [(m.operator, m.new) for m in mutate.Generator("a.cpp", text).run()]


def body(statement):
    return f"int f(int a, int b) {{\n  {statement}\n}}\n"


@functools.lru_cache
def all_keys():
    return [m.key for m in run.generated(ROOT)]


class Generated(unittest.TestCase):
    def test_operators_take_the_whole_expression_along(self):
        self.assertIn(("+ to -", "g(a) - b * 2"), of(body("return g(a) + b * 2;")))
        self.assertIn(("* to /", "g(a) + b / 2"), of(body("return g(a) + b * 2;")))
        self.assertIn(("- to +", "b + x"), of(body("return a * (b - x);")))

    def test_each_comparison_moves_and_turns(self):
        found = of(body("while (a < b) ++a;"))
        self.assertIn(("< to <=", "a <= b"), found)
        self.assertIn(("< to >=", "a >= b"), found)
        self.assertIn(("dropped statement", ""), found)

    def test_logic_negation_constants_and_calls(self):
        self.assertIn(("&& to ||", "a || b"), of(body("if (a && b) return;")))
        self.assertIn(("dropped !", " a"), of(body("if (!a) return;")))
        self.assertIn(("dropped sign", " a"), of(body("return f(-a, b);")))
        self.assertIn(("literal + 1", "8u"), of(body("x = 7u;")))
        self.assertEqual([new for o, new in of(body("x = 1.5e-3f;")) if o == "literal + 1"], ["2.5e-3f"])
        self.assertIn(("true and false", "false"), [(o, n.strip()) for o, n in of(body("x = true;"))])
        self.assertIn(("min to max", "std:: max (a, b)"), of(body("return std::min(a, b);")))
        self.assertIn(("mul_ to div_", "div_ (a, b)"), [(o, n.strip()) for o, n in of(body("return mul_(a, b);"))])

    def test_statements_and_early_ends_are_dropped(self):
        for statement, operator in {
            "a = b;": "dropped statement",
            "g(a);": "dropped statement",
            "if (a) return;": "dropped return",
            "if (a) throw E(b);": "dropped throw",
            "for (;;) break;": "dropped break",
        }.items():
            self.assertIn((operator, ""), of(body(statement)), statement)

    def test_what_is_no_code_is_left_alone(self):
        for text in (
            "// a + b\n",
            '#include <a/b - 1.h>\n#define A 1 + 2 \\\n  + 3\n',
            'static_assert(sizeof(int) == 4, "a + b");\n',
            "constexpr int kSize = 1 + 2;\n",
            "enum class A { a = 1, b = 1 + 2 };\n",
            "template <int kCount = 3>\nclass A;\n",
            "int f(int a, float* b);\n",
            body("const int c = a;"),
            "#if defined(__CUDA_ARCH__)\nint f() { return a + b; }\n#endif\n",
        ):
            self.assertEqual(of(text), [], text)

    def test_text_for_people_is_left_alone(self):
        found = of(body('require(a < b, "a + b: ", a + b, 7, x.value_or(0));'))
        self.assertEqual({o for o, _ in found}, {"< to <=", "< to >=", "dropped statement"})
        self.assertEqual(of(body('throw E("a", a + b);')), [("dropped throw", "")])

    def test_keys_are_unique_in_the_tree(self):
        keys = all_keys()
        self.assertGreater(len(keys), 10000)
        repeated = len(keys) - len(set(keys))
        self.assertLess(repeated, len(keys) // 10)  # lines that occur twice in a file share theirs


class Schemata(unittest.TestCase):
    def test_the_chosen_mutant_is_the_one_at_work(self):
        mutants = mutate.Generator("a.cpp", PROGRAM).run()
        for number, mutant in enumerate(mutants, 1):
            mutant.number = number
        text, left_out = mutate.schemata(PROGRAM, mutants)
        self.assertEqual(left_out, [])
        text = '#include <cstdlib>\nstatic bool pacer_mutant_is(int n) { return n == std::atoi(std::getenv("N")); }\n' + text
        with tempfile.TemporaryDirectory() as folder:
            source, program = f"{folder}/a.cpp", f"{folder}/a"
            pathlib.Path(source).write_text(text)
            subprocess.run([*COMPILER, source, "-o", program], check=True)
            outputs = {}
            for number in range(len(mutants) + 1):
                result = subprocess.run([program], env={"N": str(number)}, capture_output=True, text=True, check=True)
                outputs[number] = result.stdout
        by_operator = {m.operator: outputs[m.number] for m in mutants}
        self.assertEqual(outputs[0], "8 19")
        self.assertEqual(by_operator["&& to ||"], "8 8")
        self.assertEqual(by_operator["> to <="], "11 19")
        self.assertEqual(by_operator["- to +"], "10 21")
        self.assertEqual(by_operator["> to >="], "8 19")  # equivalent here

    def test_an_error_of_the_compiler_names_its_mutant(self):
        mutants = [m for m in mutate.Generator("a.cpp", PROGRAM).run() if m.operator in ("&& to ||", "- to +")]
        for number, mutant in enumerate(mutants, 1):
            mutant.number = number
        text, _ = mutate.schemata(PROGRAM, mutants)
        lines = text.split("\n")
        for mutant in mutants:
            line = next(i for i, l in enumerate(lines, 1) if l.startswith(f"pacer_mutant_is({mutant.number})"))
            self.assertEqual(mutate.numbers_at(text, line), mutant.number)
        self.assertIsNone(mutate.numbers_at(text, 1))

    def test_ranges_that_overlap_in_part_are_left_out(self):
        def mutant(start, end):
            return mutate.Mutant("a", "x", start, end, "y", False, 1, "", 1)

        _, left_out = mutate.schemata("a + b + c", [mutant(0, 5), mutant(4, 9)])
        self.assertEqual([(m.start, m.end) for m in left_out], [(4, 9)])


class Lists(unittest.TestCase):
    def test_every_mutant_made_by_hand_applies(self):
        mutants = run.hand_made(ROOT)
        self.assertGreaterEqual(len(mutants), 40)
        self.assertEqual(len({m.key for m in mutants}), len(mutants))
        for mutant in mutants:
            self.assertNotEqual(mutant.new, (ROOT / mutant.file).read_text()[mutant.start : mutant.end])

    def test_a_text_that_is_gone_or_stands_twice_is_an_error(self):
        entry = {"file": "a.cpp", "old": "a + b", "new": "a", "meaning": "x"}
        self.assertEqual(mutate.by_hand(entry, "x = a + b;").start, 4)
        for text in ("x = a - b;", "x = a + b; y = a + b;"):
            with self.assertRaisesRegex(ValueError, "a.cpp: found . times"):
                mutate.by_hand(entry, text)

    def test_every_equivalent_mutant_still_exists(self):
        generated = set(all_keys())
        entries = json.loads((run.HERE / "equivalent.json").read_text())
        self.assertEqual([entry["key"] for entry in entries if entry["key"] not in generated], [])
        for entry in entries:
            self.assertGreater(len(entry["why"].split()), 3, entry["key"])


if __name__ == "__main__":
    COMPILER = sys.argv[1:] or COMPILER
    unittest.main(argv=sys.argv[:1])
