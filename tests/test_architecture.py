"""The house rules that a program can check: imports, torch, size and shape of functions."""

import ast
from pathlib import Path

import pytest

import sklearn_bert

PACKAGE = Path(sklearn_bert.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# A file imports only from lower storeys. docs/architecture.md says what each is for.
STOREYS = {
    "exceptions.py": 0,
    "_pooling.py": 0,
    "_layers.py": 0,
    "_batching.py": 0,
    "_documents.py": 0,
    "_tokenization.py": 1,
    "_windows.py": 0,
    "_packed_linear.py": 0,
    "_callbacks.py": 0,
    "_process_lock.py": 0,
    "_progress.py": 0,
    "_store.py": 0,
    "_model_files.py": 1,
    "_fast_bert.py": 1,
    "_forward.py": 1,
    "_memory_store.py": 1,
    "_disk_store.py": 1,
    "_devices.py": 1,
    "_model_loading.py": 2,
    "_models.py": 3,
    "_tiered_store.py": 2,
    "_cache.py": 3,
    "_text_states.py": 4,
    "_extract.py": 5,
    "_token_features.py": 6,
    "_featurizer.py": 7,
    "_portable.py": 8,
    "testing.py": 7,
    "datasets/_packaged_model.py": 7,
    "datasets/_sentence_polarity.py": 7,
    "datasets/__init__.py": 8,
    "__init__.py": 9,
}
USE_TORCH = {
    "_fast_bert.py",
    "_forward.py",
    "_models.py",
    "_model_loading.py",
    "_devices.py",
    "_packed_linear.py",
    "testing.py",
}


def tree(file):
    return ast.parse((PACKAGE / file).read_text("utf-8"))


def imported_modules(file):
    """Absolute names of all modules a file imports, also inside functions."""
    package = ["sklearn_bert", *Path(file).parent.parts]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def own_files(file):
    """Files of this package that a file imports."""
    for module in imported_modules(file):
        path = module.removeprefix("sklearn_bert").lstrip(".").replace(".", "/")
        if module.startswith("sklearn_bert"):
            yield from (name for name in (f"{path}.py", f"{path}/__init__.py") if name in FILES)


def functions(file):
    return [
        node
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_every_file_has_a_storey():
    assert set(STOREYS) == set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_from_lower_storeys(file):
    upward = [other for other in own_files(file) if STOREYS[other] >= STOREYS[file]]
    assert upward == []


@pytest.mark.parametrize("file", FILES)
def test_torch_and_transformers_stay_in_their_rooms(file):
    names = {module.split(".")[0] for module in imported_modules(file)}
    type_only = file in {"_pooling.py"}  # Tensor, for annotations
    assert not names & {"torch", "transformers"} or file in USE_TORCH or type_only


@pytest.mark.parametrize("file", FILES)
def test_functions_fit_on_a_screen(file):
    for function in functions(file):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        assert lines <= 60, f"{function.name} has {lines} lines"


@pytest.mark.parametrize("file", FILES)
def test_functions_are_annotated_and_take_no_kwargs(file):
    for function in functions(file):
        arguments = function.args
        assert function.returns is not None, function.name
        if function.name != "__init__":
            assert arguments.kwarg is None, function.name


@pytest.mark.parametrize("file", [f for f in FILES if f != "__init__.py"])
def test_all_lists_every_public_name(file):
    module = tree(file)
    exported = next(
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    defined = {
        node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    if file.endswith("__init__.py"):
        return
    assert {name for name in defined if not name.startswith("_")} <= set(exported) | {
        "combine",  # functions that only their own file and its tests use
        "find_blocks",
    }


def test_the_public_namespace_is_what_it_says():
    for name in sklearn_bert.__all__:
        assert getattr(sklearn_bert, name) is not None
    assert set(sklearn_bert.__all__) <= set(dir(sklearn_bert))
    with pytest.raises(AttributeError, match="no_such_name"):
        sklearn_bert.no_such_name  # noqa: B018
