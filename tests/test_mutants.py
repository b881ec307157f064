"""The table of mistakes fits the code, so that `make mutants` can make each of them."""

import re
from pathlib import Path

import mutants
import pytest

ROOT = Path(mutants.__file__).parent.parent


def test_each_mistake_has_its_place_and_the_tests_that_it_names_exist():
    table = mutants.read_table()
    assert len({mutant.name for mutant in table}) == len(table) > 100
    for first in (*(mutant.first for mutant in table), mutants.GENERAL, mutants.DEFERRED):
        options = [name for name in first if name.startswith("--")]
        for name in first[len(options) :]:
            file, _, test = name.partition("::")
            found = re.search(rf"^((?:@.*\n)*)def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
            assert found or not test, name
            # A deep test is left out otherwise, and a run without tests catches nothing.
            assert "--depth=full" in options or not found or "@pytest.mark.deep\n" not in found[1], name


def test_a_mistake_without_a_place_is_noticed(monkeypatch, tmp_path):
    table = "file align/columns.py\n\na name\n- no such text\n+ x"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "mutants.txt").write_text(f"Title\n\n{table}\n")
    (tmp_path / "mamba_align_jax" / "align").mkdir(parents=True)
    (tmp_path / "mamba_align_jax" / "align" / "columns.py").write_text("x = 1\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="occurs 0 times"):
        mutants.read_table()


@pytest.mark.parametrize(("minutes", "made"), [(None, 3), (10, 3), (0, 0)])
def test_no_mistake_is_begun_after_the_given_minutes(monkeypatch, capsys, minutes, made):
    table = [mutants.Mutant("", "", "", name, ()) for name in "abc"]
    monkeypatch.setattr(mutants, "read_table", lambda: table)
    monkeypatch.setattr(mutants, "copy_tree", lambda to: None)
    monkeypatch.setattr(mutants, "mutate", lambda tree, mutant: (tree, ""))
    monkeypatch.setattr(mutants.Path, "write_text", lambda path, text: None)
    # The tree as it is has two runs.
    is_mutant = iter([False] * 2 + [True] * 3)
    monkeypatch.setattr(mutants, "AT_ONCE", 1)
    monkeypatch.setattr(mutants, "run_tests", lambda *_: (int(next(is_mutant)), "test"))
    with pytest.raises(SystemExit) as end:
        mutants.main([] if minutes is None else [f"--minutes={minutes}"])
    assert not end.value.code
    out = capsys.readouterr().out
    assert f"{made}/{made} caught" in out
    assert ("3 were not made, because 0 minutes had passed" in out) == (made == 0)
