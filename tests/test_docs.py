"""The pages are complete and true: links lead somewhere, tables are what was measured, every public name is documented."""

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import mamba_align_jax
import pallas_kernels
from docs import generate

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTES = sorted((ROOT / "pallas_kernels").rglob("NOTES.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")), *NOTES]
API = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))

# Modules that hold no names for users: the programs, and the insides of the ops.
INTERNAL = re.compile(
    r".*\.(__main__|_\w+|cli(\.\w+)?|cases|xla|api|pallas_triton\w*|\w*sm90|weights|coefficients|decays|"
    r"(prefill|hopper|product_chain)(\.\w+)*)$"
)


def name_of(page):
    return str(page.relative_to(ROOT))


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page):
    """The anchors that GitHub and MyST give to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    for target in targets:
        if not re.match(r"https?://", target):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def test_every_file_that_a_page_names_exists():
    missing = []
    for page in PAGES:
        # The porting page names vLLM's files as well.
        rooms = "" if page.name == "porting.md" else "|align|cache|engine|layers|load|metadata|models"
        tops = f"tests|benchmarks|examples|docs|mamba_align_jax|pallas_kernels{rooms}"
        for name in re.findall(rf"`((?:{tops})/[\w/.]+\w)(?:::\w+)?`", page.read_text()):
            if not (ROOT / name).exists() and not (ROOT / "mamba_align_jax" / name).exists():
                missing.append(f"{name_of(page)}: {name}")
    examples = ("benchmarks/results/FILE.jsonl", "layers/leaky_sum.py")
    assert [line for line in missing if not line.endswith(examples)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=name_of)
def test_every_page_begins_with_what_its_reader_gets(page):
    first = page.read_text().split("\n\n")[1]
    assert re.match(r"(After reading this page you|From this page you|This page (documents|lists))\b", first), first


def test_every_page_is_in_the_site():
    entries = {
        (page.parent / entry).with_suffix(".md")
        for page in (DOCS / "index.md", DOCS / "api" / "index.md")
        for tree in re.findall(r"```{toctree}\n(.*?)```", page.read_text(), re.DOTALL)
        for entry in tree.split("\n\n", 1)[1].split()
    }
    assert entries | {DOCS / "index.md"} == {page for page in PAGES if page.is_relative_to(DOCS)}


def test_every_public_name_is_in_the_api_reference():
    exports = {
        f"pallas_kernels.{name}"
        for name, value in vars(pallas_kernels).items()
        if not name.startswith("_") and type(value) is not type(pallas_kernels)
    }
    exports |= {f"mamba_align_jax.{name}" for name in mamba_align_jax.__all__}
    found, module = set(), ""
    for directive, name in re.findall(r"^\.\. (currentmodule|auto\w+):: (\S+)$", API, re.MULTILINE):
        module = name if directive == "currentmodule" else module
        found.add(f"{module}.{name}")
    assert exports - found == set()


def test_every_public_module_is_in_the_api_reference():
    found = set(re.findall(r"^\.\. automodule:: (\S+)$", API, re.MULTILINE))
    public = {
        module.name
        for package in (mamba_align_jax, pallas_kernels)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not INTERNAL.match(module.name) and not (package is pallas_kernels and module.ispkg)
    }
    assert public - found == set()
    for name in found:
        importlib.import_module(name)


def test_figures_tables_and_code_on_pages_are_what_the_script_writes():
    for path, content in generate.files().items():
        assert path.read_text() == content, f"{path}: run python -m docs.generate"


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert len(next(line for line in lines if "|" in line)) < 200


# vLLM's words for things that have another name here: the glossary has both. Each would be a second word for one thing.
VLLM_WORDS = ("state_idx", "mamba_state_idx", "max_num_reqs", '"ngram"', "'ngram'")
# Where vLLM's names are at home: the modules that take its arguments, their mutants, and the pages that translate.
MAY_SAY = (
    "mamba_align_jax/vllm_compat/", "tests/vllm_compat/", "mamba_align_jax/serve/vllm_flags.py",
    "tests/serve/test_vllm_flags.py", "tests/fakes/mode_all_server.py", "tests/fakes/host_path.py",
    "tests/mutants.txt", "tests/test_docs.py", "docs/glossary.md", "docs/porting.md",
)  # fmt: skip


def test_vllms_words_stay_where_its_arguments_are_taken():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a clone")
    pattern = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, VLLM_WORDS)) + r")(?!\w)")
    found = []
    for name in listed.stdout.splitlines():
        is_text = name.endswith((".py", ".md", ".toml", ".txt", ".jsonl")) and (ROOT / name).exists()
        if is_text and not name.startswith(MAY_SAY):
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
                found += [f"{name}:{number}: {word}" for word in pattern.findall(line)]
    assert found == []
