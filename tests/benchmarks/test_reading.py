"""A row counts for what it measured and how it was run: no reader of rows mistakes one for another."""

from collections import Counter

import pytest

from benchmarks.reading import HOW, gpu, how, key, loads, named, newest, of_one_commit, read_rows, usual, variant
from benchmarks.report import tables
from docs import generate
from docs.figures import serving

# Another way to run a case, for each way in which a row may be unusual.
OTHER = dict(
    model="other", devices=16, gpu="NVIDIA B200", configuration="defaults", weights_dtype="float8_e4m3fn",
    activation_dtype="float32", kv_dtype="float8_e4m3fn", state_dtype="bfloat16", deterministic=True,
)  # fmt: skip
FILES = {file.stem: read_rows(file) for file in generate.RESULTS.glob("*.jsonl")}


def is_other(row):
    return any(how(row)[field] == how(OTHER)[field] for field in OTHER)


def in_other_ways(rows):
    """The rows, run in each other way, by which floats are three times as large."""
    for row in rows:
        slower = {name: 3 * value if isinstance(value, float) else value for name, value in row.items()}
        yield from (slower | {field: value} for field, value in OTHER.items())


def lines_gone(old, new):
    return list((Counter(old.splitlines()) - Counter(new.splitlines())).elements())


def test_there_is_another_way_for_each_way_to_run_a_case():
    assert OTHER.keys() == HOW.keys()
    assert all(gpu(OTHER) != HOW["gpu"][0] if name == "gpu" else OTHER[name] != HOW[name][0] for name in HOW)


def test_rows_that_were_run_in_other_ways_change_no_headline_no_figure_and_no_other_line(monkeypatch):
    own = {name: [row for row in rows if not is_other(row)] for name, rows in FILES.items()}
    both = {name: [*rows, *in_other_ways(newest(rows))] for name, rows in own.items()}
    written = []
    for files in (own, both):
        monkeypatch.setattr(generate, "rows", lambda name: files.get(name, []))  # noqa: B023
        written.append(generate.files())
    before, after = written
    for path, old in before.items():
        if path.suffix == ".svg" or path.name == "README.md":
            assert after[path] == old, path
        else:
            assert [line for line in lines_gone(old, after[path]) if line != generate.NOT_YET] == [], path


@pytest.mark.parametrize("file", FILES)
def test_they_add_lines_to_the_tables_of_their_file(file):
    rows = newest(row for row in FILES[file] if not is_other(row))[-200:]
    old, new = tables(rows), tables([*rows, *in_other_ways(rows)])
    for name, text in old.items():
        assert lines_gone(text, new[name]) == [], name
        assert new[name].count("\n") > text.count("\n"), name


def test_fields_that_are_absent_mean_the_usual():
    row = dict(case="decode 1x4096", step_us=1.0)
    said = row | {name: value for name, (value, _) in HOW.items()}
    assert key(row) == key(said)
    assert (named(row), variant(said)) == ("decode 1x4096", "")
    assert usual([row, said]) == [row, said]
    assert named(row | dict(case="moe decode 1x4096", model="qwen3.5-35b-a3b")) == "moe decode 1x4096"


def test_a_name_says_all_that_is_unusual():
    row = dict(case="a", devices=2, gpu="NVIDIA H100 80GB HBM3", kv_dtype="float8_e4m3fn", deterministic=True)
    assert named(row) == "a, 2 devices, H100, float8_e4m3fn keys, deterministic"
    assert named(row, "devices", "gpu") == "a, float8_e4m3fn keys, deterministic"


def test_rows_that_are_compared_are_of_the_newest_commit_that_has_them_all():
    rows = [dict(case=case, commit=commit, us=us) for case, commit, us in ("aA1", "bA2", "aB3", "bB4", "aC5")]
    a, b = dict(case="a"), dict(case="b")
    assert [row["us"] for row in of_one_commit(rows, a, b)] == ["3", "4"]
    assert [row["us"] for row in of_one_commit([*rows, rows[-1] | dict(case="b", us="6")], a, b)] == ["5", "6"]
    assert [row["us"] for row in of_one_commit([*rows, rows[-1] | dict(case="b", us="6", devices=2)], a, b)] == [
        "3",
        "4",
    ]
    with pytest.raises(LookupError):
        of_one_commit(rows, a, dict(case="c"))


def test_modes_are_compared_at_one_commit_and_newer_rows_count_besides():
    load = dict(workload="w", requests=1, loop="closed", drafts=0, hit_rate_of_attainable=1.0)
    rows = [
        load | dict(case=mode, mode=mode, commit=commit)
        for mode, commit in (("none", "A"), ("copy", "A"), ("copy", "B"), ("none", "B"), ("copy", "C"), ("copy", "D"))
    ]
    assert loads(rows) == [{"none": rows[3], "copy": rows[2]}]
    assert newest(rows) == [rows[2], rows[3], rows[5]]
    assert loads([rows[0] | dict(devices=2), *rows[4:]]) == [{"none": rows[0] | dict(devices=2)}, {"copy": rows[5]}]


def pair(name, *modes):
    """Rows of a load of the serving benchmark in these modes, at a commit of this name, newer than all others."""
    (row, *_) = usual(FILES["serving"], workload="prefix_repetition", loop="closed", drafts=0, mode="none")
    row = row | dict(commit=name, date="2099-01-01", requests=77)
    return [row | dict(mode=mode, case=mode, ttft_ms_mean=500.0 + place) for place, mode in enumerate(modes)]


def test_the_headline_is_of_the_newest_commit_that_timed_both_modes(monkeypatch):
    more = [*pair("both", "none", "align/copy_free"), *pair("alone", "align/copy_free")]
    monkeypatch.setattr(generate, "rows", lambda name: FILES[name] + (more if name == "serving" else []))
    said = " ".join(generate.part("headlines").split())
    assert "77 prompts share" in said
    assert "first token from 500 to 501 ms" in said
    assert "tokens/s (both)" in said


def test_the_figure_has_a_bar_for_each_mode_of_a_load_that_has_several():
    alone = pair("alone", "align/copy_free")[0] | dict(requests=78)
    text = serving.draw([*pair("both", "none", "all", "align/deferred"), alone])
    assert text.count('class="bar') == 3 + 3 * len(serving.PANELS)
    assert ">align/deferred<" in text
    assert ">all<" in text
    assert ">500<" in text
    assert "prefix_repetition x77" in text
    assert "prefix_repetition x78" not in text
