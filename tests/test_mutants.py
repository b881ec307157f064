"""The table of mistakes fits the code, so that `make mutants` can make each of them."""

from pathlib import Path

import mutants
import pytest

ROOT = Path(mutants.__file__).parent.parent


def test_each_mistake_has_its_place_and_the_tests_that_it_names_exist():
    table = mutants.read_table()
    assert len({mutant.name for mutant in table}) == len(table) > 100
    named = [name for mutant in table for name in mutant.first]
    for name in (*named, *mutants.GENERAL, *mutants.DEFERRED):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text() or not test, name


def test_a_mistake_without_a_place_is_noticed(monkeypatch, tmp_path):
    table = "file align/columns.py\n\na name\n- no such text\n+ x"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "mutants.txt").write_text(f"Title\n\n{table}\n")
    (tmp_path / "mamba_align_jax" / "align").mkdir(parents=True)
    (tmp_path / "mamba_align_jax" / "align" / "columns.py").write_text("x = 1\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="occurs 0 times"):
        mutants.read_table()
