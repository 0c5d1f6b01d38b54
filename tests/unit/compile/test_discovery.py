"""Which operators stand behind a unit, read from sources: small trees, some of them hostile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.compile.changes import SourceChange
from builder.compile.cplusplus import NO_KEY, Macros, holds, read, registered, scan
from builder.compile.extensionwheel import wheel_sources
from builder.compile.operators import Discovery, OperatorsUnknown, registration_source
from builder.compile.sources import BuildRecipe, Extension, Sources, Unit

if TYPE_CHECKING:
    from pathlib import Path

DEFINED = Macros({"HERE": "", "LEVEL": "3"}, frozenset({"NOT_HERE"}))
BINDINGS = """
#include "ops.h"
#include "core/registration.h"
TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  // ops.impl("gone", torch::kCUDA, &gone);
  ops.def("act(Tensor! out, Tensor x) -> ()");
  ops.impl("act", torch::kCUDA, &act);
  ops.def("split(Tensor x, str f=\\"a,b(c\\") -> "
          "Tensor");
  ops.impl("split", c10::DispatchKey::CPU, &vllm::split);
  ops.def("plain", &plain);
#ifdef NOT_HERE
  ops.impl("other", torch::kCUDA, &act);
#endif
}
TORCH_LIBRARY_EXPAND(CONCAT(TORCH_EXTENSION_NAME, _cache_ops), cache) {
  cache.def("copy(Tensor x) -> ()", {at::Tag::needs_fixed_stride_order});
  cache.impl("copy", torch::kCUDA, &entry);
}
"""
OPS = """
#pragma once
void act(int& out, int x);
namespace vllm { int split(int x); }
int plain();
void entry();
void launcher(int);
"""
FILES = {
    "CMakeLists.txt": "if(HIP)\n  add_definitions(-DNOT_HERE)\nendif()\n",
    "csrc/ops.h": OPS,
    "csrc/core/registration.h": "#include <Python.h>\n",
    "csrc/torch_bindings.cpp": BINDINGS,
    "csrc/act.cu": '#include "ops.h"\nvoid act(int& out, int x) { out = x; }\n',
    "csrc/split.cu": (
        "namespace vllm { int split(int x) { return x; } }\nint plain() { return 1; }\n"
    ),
    "csrc/entry.cu": '#include "ops.h"\nvoid entry() { launcher(3); }\n',
    "csrc/launcher.cu": (
        "__global__ void kernel(int) {}\nvoid launcher(int x) { kernel<<<1, 1>>>(x); }\n"
    ),
}


def tree(root: Path, changed: dict[str, str]) -> Discovery:
    """A release of a few lines; its units are the files that are not headers."""
    sources, recipe = parts(root, changed)
    return Discovery(sources, recipe, "1.0")


def parts(root: Path, changed: dict[str, str]) -> tuple[Sources, BuildRecipe]:
    files = {**FILES, **changed}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    units = {
        path: Unit(path=path, extension="_C", gencodes=(("compute_121a", "sm_121a"),))
        for path in files
        if path.endswith((".cu", ".cpp"))
    }
    recipe = BuildRecipe(
        arch_list="12.1a",
        cuda="13.0",
        archs=("12.1a",),
        supported=("12.1",),
        units=units,
        extensions={"_C": Extension(name="_C", language="CUDA", sabi="3", definitions=())},
        flags=(),
    )
    return Sources(root), recipe


def asked(
    root: Path, path: str, changed: dict[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Operators with their keys, and siblings, of one unit."""
    sources, recipe = parts(root, changed or {})
    found = Discovery(sources, recipe, "1.0").behind([recipe.units[path]])
    operators = sorted(f"{operator.name} {operator.key}" for operator in found.operators)
    return operators, [unit.path for unit in found.siblings]


# ------------------------------------------------------------------------------------ reading text


def test_comments_become_blanks_and_positions_are_kept() -> None:
    raw = 'int a; // "x\n/* { */ char c = \'"\'; auto s = R"q(})" )q"; int n = 1\'000; "b//c"\n'
    text = read(raw, DEFINED)
    assert len(text.code) == len(text.strings) == len(raw)
    assert "{" not in text.code
    assert "}" not in text.code
    assert text.code.index("int n = 1'000;") == raw.index("int n = 1'000;")
    assert '"b//c"' in text.strings
    assert "b//c" not in text.code


@pytest.mark.parametrize(
    ("condition", "held"),
    [
        ("defined(HERE)", True),
        ("!defined HERE", False),
        ("defined(NOT_HERE) || LEVEL >= 3", True),
        ("defined(NOT_HERE) && UNHEARD_OF", False),
        ("HERE && UNHEARD_OF", None),
        ("UNHEARD_OF > 2", None),
        ("LEVEL + 1 > 2", None),
        ("__has_include(<x.h>)", None),
        ("(LEVEL == 0x3) && !(LEVEL < 3)", True),
        ("", None),
    ],
)
def test_a_condition_is_true_or_false_or_unknown(condition: str, held: bool | None) -> None:
    assert holds(condition, DEFINED) is held


def test_branches_that_the_build_leaves_out_are_blank() -> None:
    raw = (
        "#ifdef NOT_HERE\nint a;\n#elif defined(HERE)\nint b;\n#else\nint c;\n#endif\n"
        "#if UNHEARD_OF\nint d;\n#else\nint e;\n#endif\n#ifndef HERE\n#if LEVEL\nint f;\n#endif\n"
        "#endif\n#define TWICE(x) helper(x); \\\n  other(x)\n"
    )
    text = read(raw, DEFINED)
    assert [name for name in "abcdef" if f"int {name};" in text.code] == ["b", "d", "e"]
    assert {"helper", "other"} <= text.macros
    assert "TWICE" not in text.macros


SCANNED = """
template <typename T, int N = sizeof(int (*)(int))>
struct Outer { void member(); int inside() { return used_here(1); } };
namespace a::b { namespace { void hidden() {} } void shown() { extern void local(int); local(2); } }
template <> void special<int>(int) {}
template <typename T> void generic(T) {}
template void generic<float>(float);
static void own() {}
__device__ int device_code() { return 0; }
__global__ void __launch_bounds__(256, 2) kernel(int* x) { x[0] = 1; }
std::tuple<int, int> pair(std::function<void(int)> f) { return {1, 2}; }
int table[] = {looked_up(), 2};
constexpr int fixed = 3;
extern int elsewhere;
int elsewhere2(int), another;
void a::b::Outer::qualified() const noexcept { }
MACRO(x) int after_macro() { return 0; }
Class::Class(int x) : x_(x), y_{x} { }
using Alias = void (*)(int);
extern "C" { void with_c_linkage() {} }
"""


def test_functions_are_found_with_the_namespaces_around_them() -> None:
    facts = scan(read(SCANNED, DEFINED))
    defined = {"::".join(name) for name in facts.defined}
    assert {
        "a::b::shown", "special", "generic", "kernel", "pair", "table", "after_macro",
        "a::b::Outer::qualified", "with_c_linkage",
    } <= defined  # fmt: skip
    inside = {"::".join(name) for name in facts.inside}
    assert {"a::b::hidden", "own", "device_code", "generic", "fixed"} <= inside
    assert not defined & {"own", "a::b::hidden", "hidden", "device_code", "fixed", "MACRO"}
    assert ("generic",) in facts.templates
    declared = {"::".join(name) for name in facts.declared}
    assert {"Outer::member", "elsewhere", "a::b::local"} <= declared
    assert {"used_here", "looked_up"} <= facts.used
    assert facts.whole


def test_unbalanced_brackets_are_detected() -> None:
    raw = "#if UNHEARD_OF\nvoid f(int) {\n#else\nvoid f() {\n#endif\n}\nvoid g() {}\n"
    assert not scan(read(raw, DEFINED)).whole


def test_registrations_of_every_form_are_read() -> None:
    text = read(BINDINGS, DEFINED)
    rows = registered(scan(text).blocks, text, "_C")
    assert [(row.name, row.key, row.function) for row in rows] == [
        ("_C::act", "CUDA", ("act",)),
        ("_C::split", "CPU", ("vllm", "split")),
        ("_C::plain", NO_KEY, ("plain",)),
        ("_C_cache_ops::copy", "CUDA", ("entry",)),
    ]


def test_registrations_of_the_stable_abi_are_read() -> None:
    raw = (
        'STABLE_TORCH_LIBRARY_FRAGMENT(_C, m) { m.def("a.out(Tensor x) -> ()"); }\n'
        "STABLE_TORCH_LIBRARY_IMPL(_C, CompositeExplicitAutograd, m) {\n"
        '  m.impl("a.out", TORCH_BOX(&ns::a_out));\n'
        '  m.impl("b", TORCH_BOX([](int x) { return x; }));\n}\n'
    )
    text = read(raw, DEFINED)
    first, second = registered(scan(text).blocks, text, "_C")
    assert (first.name, first.abi, first.function) == ("_C::a.out", "stable", ("ns", "a_out"))
    assert first.key == "CompositeExplicitAutograd"
    assert second.function == (), "a lambda cannot be registered anew"


# --------------------------------------------------------------------------------------- discovery


@pytest.mark.parametrize(
    ("path", "operators", "siblings"),
    [
        ("csrc/act.cu", ["_C::act CUDA"], []),
        ("csrc/split.cu", [f"_C::plain {NO_KEY}", "_C::split CPU"], []),
        ("csrc/entry.cu", ["_C_cache_ops::copy CUDA"], ["csrc/launcher.cu"]),
        ("csrc/launcher.cu", ["_C_cache_ops::copy CUDA"], ["csrc/entry.cu"]),
    ],
)
def test_a_unit_leads_to_its_operators(
    tmp_path: Path, path: str, operators: list[str], siblings: list[str]
) -> None:
    assert asked(tmp_path, path) == (operators, siblings)


def test_a_unit_with_its_own_operator_still_includes_its_callers(tmp_path: Path) -> None:
    """Else a caller in the release's extension would go on with what was there before."""
    text = FILES["csrc/launcher.cu"] + "int plain() { return 2; }\n"
    changed = {"csrc/launcher.cu": text, "csrc/split.cu": "namespace vllm { int split(int x); }\n"}
    operators, siblings = asked(tmp_path, "csrc/launcher.cu", changed)
    assert operators == [f"_C::plain {NO_KEY}", "_C_cache_ops::copy CUDA"]
    assert siblings == ["csrc/entry.cu"]


def test_a_function_that_is_declared_where_it_is_called_counts(tmp_path: Path) -> None:
    changed = {
        "csrc/ops.h": OPS.replace("void launcher(int);", ""),
        "csrc/entry.cu": "void entry() {\n  extern void launcher(int x);\n  launcher(3);\n}\n",
    }
    assert asked(tmp_path, "csrc/launcher.cu", changed)[1] == ["csrc/entry.cu"]


def test_template_instances_made_by_macros_count(tmp_path: Path) -> None:
    changed = {
        "csrc/ops.h": OPS.replace("void launcher(int);", "template <int N> void launcher(int);"),
        "csrc/entry.cu": '#include "ops.h"\nvoid entry() { launcher<2>(3); }\n',
        "csrc/launcher.cu": (
            "template <int N> void launcher(int x) {}\n"
            "#define INSTANCE(N) template void launcher<N>(int);\nINSTANCE(2)\n"
        ),
    }
    assert asked(tmp_path, "csrc/launcher.cu", changed)[1] == ["csrc/entry.cu"]


def test_the_same_name_for_another_function_is_not_a_call(tmp_path: Path) -> None:
    text = "namespace x { static void launcher(int) {} void act() { launcher(1); } }\n"
    assert asked(tmp_path, "csrc/launcher.cu", {"csrc/x.cu": text})[1] == ["csrc/entry.cu"]


HOSTILE = {
    "a lambda": (
        BINDINGS.replace("&act)", "[](int& o, int x) { act(o, x); })"),
        "names act of csrc/act.cu in an unsupported form",
    ),
    "a macro": (
        "#define BIND(f) ops.impl(#f, torch::kCUDA, &f)\n"
        + BINDINGS.replace('ops.impl("act", torch::kCUDA, &act);', "BIND(act);"),
        "unsupported form",
    ),
    "another name": (
        BINDINGS.replace(
            "TORCH_LIBRARY_EXPAND(TORCH_EXT", "TORCH_LIBRARY_EXPAND(PICK(1) TORCH_EXT"
        ),
        "registers operators in an unsupported form",
    ),
    "twice": (
        BINDINGS.replace("cache.impl(", 'ops2.impl("x", &act);\n  cache.impl(').replace(
            'ops.def("plain"', 'ops.impl("act", torch::kCUDA, &act);\n  ops.def("plain"'
        ),
        "is registered twice for CUDA",
    ),
    "no header": (BINDINGS.replace('#include "ops.h"', "void act(int&, int);"), "in no header"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_registrations_that_cannot_be_repeated_are_refused(tmp_path: Path, what: str) -> None:
    text, said = HOSTILE[what]
    with pytest.raises(OperatorsUnknown, match=said):
        asked(tmp_path, "csrc/act.cu", {"csrc/torch_bindings.cpp": text})


def test_a_function_that_two_units_define_is_refused(tmp_path: Path) -> None:
    again = {"csrc/again.cu": FILES["csrc/act.cu"]}
    with pytest.raises(
        OperatorsUnknown, match=r"act, which 2 units define: csrc/act\.cu, csrc/again\.cu"
    ):
        asked(tmp_path, "csrc/act.cu", again)


def test_a_unit_that_nobody_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorsUnknown, match=r"calls its functions \(alone\)"):
        asked(tmp_path, "csrc/alone.cu", {"csrc/alone.cu": "void alone() {}\n"})
    with pytest.raises(OperatorsUnknown, match="no function that other units can call"):
        asked(tmp_path, "csrc/none.cu", {"csrc/none.cu": "static void none() {}\n"})


def test_the_registrations_themselves_are_not_compiled_again(tmp_path: Path) -> None:
    with pytest.raises(OperatorsUnknown, match="registers the extension's operators"):
        asked(tmp_path, "csrc/torch_bindings.cpp")


def test_a_unit_that_cannot_be_parsed_is_refused(tmp_path: Path) -> None:
    broken = "#if UNHEARD_OF\nvoid launcher(int) {\n#else\nvoid launcher(int x) {\n#endif\n}\n"
    with pytest.raises(OperatorsUnknown, match="brackets do not match"):
        asked(
            tmp_path,
            "csrc/entry.cu",
            {
                "csrc/launcher.cu": f"void launcher(int);\n{broken}"
                "void launcher(int) {}\n"
                "template <int N> void launcher(int) {}\n",
                "csrc/entry.cu": '#include "ops.h"\n#include "x.h"\n'
                "void entry() { launcher(1); }\n",
                "csrc/x.h": broken,
            },
        )


def test_more_than_a_third_of_an_extension_is_refused(tmp_path: Path) -> None:
    many = {f"csrc/k{n}.cu": f"void launcher{n}(int x) {{}}\n" for n in range(12)}
    calls = " ".join(f"launcher{n}(1);" for n in range(12))
    declared = "".join(f"void launcher{n}(int);\n" for n in range(12))
    changed = {
        **many,
        "csrc/entry.cu": f'#include "ops.h"\n{declared}void entry() {{ {calls} }}\n',
    }
    with pytest.raises(
        OperatorsUnknown, match="13 of the 17 units of _C would be compiled, more than one"
    ):
        asked(tmp_path, "csrc/k3.cu", changed)


def test_two_extensions_are_refused(tmp_path: Path) -> None:
    discovery = tree(tmp_path, {})
    units = [Unit(path="csrc/act.cu", extension=name, gencodes=()) for name in ("_C", "_moe_C")]
    with pytest.raises(OperatorsUnknown, match=r"units of 2 extensions \(_C, _moe_C\)"):
        discovery.behind(units)


# ----------------------------------------------------------------------------- registered once more


def test_discovered_operators_use_the_headers_of_the_release(tmp_path: Path) -> None:
    sources, recipe = parts(tmp_path, {})
    found = Discovery(sources, recipe, "1.0").behind([recipe.units["csrc/split.cu"]])
    text = registration_source(found.operators, "spark-build/x/1.0")
    assert '#include "ops.h"' in text
    assert 'TORCH_LIBRARY_IMPL(_C, CPU, m) {\n  m.impl("split", &vllm::split);' in text
    assert f'TORCH_LIBRARY_IMPL(_C, {NO_KEY}, m) {{\n  m.impl("plain", &plain);' in text
    assert "Python.h" not in text
    assert found.operators[0].module == "vllm/_C"


OWN = """
#include "core/registration.h"
namespace inner {
static int own(int x) { return x; }
STABLE_TORCH_LIBRARY_FRAGMENT(_C, m) {
  m.def("own(int x) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(_C, CUDA, m) { m.impl("own", TORCH_BOX(&own)); }
}
int last() { return __LINE__; }
"""


def test_a_unit_that_registers_itself_does_so_as_the_extension_wheel(tmp_path: Path) -> None:
    sources, recipe = parts(tmp_path, {"csrc/own.cu": OWN})
    unit = recipe.units["csrc/own.cu"]
    found = Discovery(sources, recipe, "1.0").behind([unit])
    (operator,) = found.operators
    assert (operator.name, operator.key, operator.own) == ("_C::own", "CUDA", True)
    assert "impl(" not in registration_source(found.operators, "m")
    change = SourceChange(name="x", texts={})
    made = wheel_sources(sources, recipe, change, [unit], "spark-build/x/1.0")
    text = made.texts["csrc/own.cu"].decode()
    assert "m.def" not in text, "torch defines an operator once"
    marked = '#line 1 "spark-build/x/1.0"\nSTABLE_TORCH_LIBRARY_IMPL(_C, CUDA, m) {'
    assert marked in text
    end = text[: text.index("int last")]
    assert end.rstrip().endswith("}")
    line = OWN[: OWN.index("}\nint last")].count("\n")
    assert f'#line {line} "csrc/own.cu"' in end
    assert made.texts["csrc/core/registration.h"] == b"// #include <Python.h>\n"
    assert set(made.texts) == {"csrc/own.cu", "csrc/core/registration.h"}
