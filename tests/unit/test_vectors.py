"""Every number of the specification's vectors is the expected value or the input of a test, or is excused."""

from __future__ import annotations

from tests.vectors import EXCUSED, leaves, readers, words_of_tests

SOURCE = '''
OLD = vector("V2.dapo", "old")
UNUSED = vector("V2.dapo", "new")

def ratio(rows):
    return vector("V2.dapo")["rho"]

@pytest.mark.parametrize("key", ["token_mean"])
def test_one(key):
    """mask"""
    assert ratio(OLD) == given[key], "clipfrac"
'''


def test_every_key_of_the_vectors_is_read_by_a_test_or_excused_with_a_reason() -> None:
    unread = [" > ".join(key) for key, tests in readers().items() if not tests and key not in EXCUSED]
    assert unread == []


def test_what_is_excused_is_in_the_file_and_read_by_no_test() -> None:
    found = readers()
    assert {key: found.get(key) for key in EXCUSED} == {key: [] for key in EXCUSED}
    assert all(len(reason) > 20 for reason in EXCUSED.values())


def test_a_key_is_a_path_to_a_value_and_tables_of_rows_have_the_keys_of_a_row() -> None:
    keys = set(leaves())
    assert len(keys) > 200
    assert {("V8.K", "eps=0", "K2_c1_1/8"), ("V7.c_map", "rows", "k_G8"), ("V10.trace", "fresh")} <= keys
    assert ("V10.trace", "fresh", "1") not in keys


def test_a_test_reads_what_it_says_in_calls_subscripts_and_parameters_and_nothing_of_its_texts() -> None:
    words = words_of_tests(SOURCE)["test_one"]
    assert words >= {"V2.dapo", "old", "rho", "token_mean"}
    assert not words & {"new", "mask", "clipfrac"}
