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
from mamba_align_jax import _deprecated

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
API = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))

# Modules that hold no names for users: the programs, and the insides of the ops.
INTERNAL = re.compile(
    r".*\.(__main__|_\w+|cli|demo|chat|cases|xla|api|pallas_triton\w*|mosaic_gpu|(channel_)?weights|values|decays|prefill(\.\w+)?)$"
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
        # The porting page names vLLM's files as well, and the changelog names modules that are gone.
        rooms = "" if page.name in ("porting.md", "CHANGELOG.md") else "|align|cache|engine|layers|load|metadata|models"
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


def test_every_old_name_is_in_the_changelog_with_its_new_one():
    said = set(re.findall(r"`([^`]+)`", (ROOT / "CHANGELOG.md").read_text()))
    old = [(name, module) for name, modules in _deprecated.MODULES.items() for module in modules]
    assert [names for names in old if not said.issuperset(names)] == []
    words = {word for name in said for word in re.findall(r"\w+", name)}
    renamed = [(name, new) for (_, name), new in _deprecated.NAMES.items()]
    for package in ("mamba_align_jax", "pallas_kernels"):
        for file in (ROOT / package).rglob("*.py"):
            for names in re.findall(r"^ *@renamed_(?:fields|keywords)\(([^)]+)\)", file.read_text(), re.MULTILINE):
                renamed += re.findall(r'(\w+)="([^"]+)"', names)
    assert len(renamed) > 20
    assert [names for names in renamed if not words.issuperset([names[0], *names[1].split(".")])] == []


# Words that have another name now: the glossary has the new ones. Each would be a second word for one thing.
OLD_WORDS = (
    "conv_row", "read_row", "row_offset", "state_idx", "mamba_state_idx", "nc_lo", "nc_hi", "max_num_reqs",
    '"ngram"', "'ngram'", "NGramDrafter", "NGramLookup", "save_checkpoint", "read_checkpoint",
    "mamba_align_jax.spec", "mamba_align_jax.pool", "align.host", "align/host", "align.staging", "align/staging",
    "metadata.kinds", "metadata.tokens", "metadata.block_idx", "metadata.attention", "models.checkpoint",
    "engine.demo", "engine/demo", "mtp_drafting", "device_drafting",
    "pallas_kernels._chunks", "pallas_kernels._pool", "pallas_kernels._rows", "pallas_kernels._dispatch",
)  # fmt: skip
# Foreign names behind their door, the old names that still work and their tests, and the pages that translate.
MAY_SAY = (
    "mamba_align_jax/vllm_compat/", "tests/vllm_compat/", "tests/fakes/mode_all_server.py", "tests/fakes/host_path.py",
    "tests/mutants.txt", "mamba_align_jax/_deprecated.py", "pallas_kernels/_deprecated.py", "tests/test_deprecated.py",
    "tests/kernels/test_deprecated.py", "tests/test_docs.py", "CHANGELOG.md", "docs/glossary.md", "docs/porting.md",
)  # fmt: skip


def test_old_words_are_gone():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a clone")
    pattern = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, OLD_WORDS)) + r")(?!\w)")
    found = []
    for name in listed.stdout.splitlines():
        if name.endswith((".py", ".md", ".toml", ".txt", ".jsonl")) and not name.startswith(MAY_SAY):
            lines = (ROOT / name).read_text().splitlines()
            for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), 1):
                # Old names stand where they are mapped to new ones, and where a test expects the warning.
                is_accepted = re.search(r"renamed_\w+\(|\"\w+\": \"", line) or "DeprecationWarning" in before
                found += [f"{name}:{number}: {word}" for word in pattern.findall(line) if not is_accepted]
    assert found == []
