"""Python and the C++ sources declare the same functions and structures.

ctypes cannot tell: a field too few, or two in another order, would be read from the wrong place.
"""

import ctypes
import re
from collections.abc import Iterator

import pytest

from blockdraft.kernels.cpu import structs
from blockdraft.kernels.cpu.build import SOURCES
from blockdraft.kernels.cpu.library import ARGUMENTS, RESULTS

_TYPES = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
_STRUCTS = {
    name: kind
    for name, kind in vars(structs).items()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
}
_COMMENTS = re.compile(r"//[^\n]*")
_SOURCES = _COMMENTS.sub(
    "", "\n".join(path.read_text() for path in sorted(SOURCES.iterdir()) if path.is_file())
)
_CONSTANTS = dict(re.findall(r"constexpr int (\w+) = (\d+);", _SOURCES))
_FUNCTIONS = {
    name: (result, arguments)
    for result, name, arguments in re.findall(
        r"^([\w:]+\*? )blockdraft_(\w+)\(([^)]*)\) (?:try )?\{", _SOURCES, re.MULTILINE
    )
}


def _kind(declared: str) -> type | None:
    if "*" in declared:
        return ctypes.c_void_p
    word = declared.replace("const ", "").split()[0].removeprefix("blockdraft::")
    return _STRUCTS[word] if word in _STRUCTS else _TYPES[word]


def _fields(name: str) -> Iterator[tuple[str, type | None]]:
    """As the sources declare them, a structure within that Python does not have field by field."""
    (body,) = re.findall(rf"^struct {name} \{{\n(.*?)^\}};", _SOURCES, re.MULTILINE | re.DOTALL)
    for declaration in body.split(";"):
        if "(" in declaration:  # the functions of the structure stand behind its fields
            return
        names = re.fullmatch(r"\s*((?:const )?\w+)([* ].+)", declaration)
        if names is None:
            assert not declaration.strip(), declaration
            continue
        for one in names[2].split(","):
            parts = re.fullmatch(r"\s*(\*?)\s*(\w+)(?:\[(\w+)\])?(?: = \w+)?\s*", one)
            assert parts is not None, declaration
            star, field, size = parts.groups()
            if not star and names[1] not in {*_TYPES, *_STRUCTS}:
                yield from _fields(names[1])
                continue
            kind = _kind(names[1] + star)
            yield field, kind * int(_CONSTANTS.get(size, size)) if size else kind


@pytest.mark.parametrize("name", _STRUCTS)
def test_a_structure_has_the_fields_of_the_sources_in_their_order(name):
    assert list(_STRUCTS[name]._fields_) == list(_fields(name))


def test_the_functions_are_those_of_the_sources():
    assert set(ARGUMENTS) == set(_FUNCTIONS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_function_takes_and_returns_what_the_sources_declare(name):
    result, arguments = _FUNCTIONS[name]
    assert ARGUMENTS[name] == [_kind(one) for one in arguments.split(",") if one.strip()]
    assert RESULTS.get(name) == _kind(result)
