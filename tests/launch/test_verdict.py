"""What is said about the ends of workers, and the exit code that follows."""

import signal

from titanlite.launch.verdict import End, explain, explain_hang


def test_different_reasons_are_said_with_their_ranks():
    ends = [End(0, 4, 1.0, "no disk"), End(2, 4, 1.1, "no disk"), End(1, 4, 1.2, "no file")]
    assert explain(ends, None, set()) == ("[ranks 0, 2] no disk\n[rank 1] no file", 4)


def test_the_first_known_end_decides():
    assert explain([End(1, 4, 1.0, "a"), End(0, 2, 2.0, "b")], None, set())[1] == 4
    assert explain([End(1, 1, 1.0, "a"), End(0, 75, 2.0, "b")], signal.SIGINT, set())[1] == 75


def test_a_worker_that_said_nothing_is_told_by_its_code():
    assert explain([End(3, 7, 1.0, None)], None, set()) == ("Rank 3 failed first: it ended with exit code 7.", 7)
    text, code = explain([End(3, -signal.SIGSEGV, 1.0, None)], None, set())
    assert (text, code) == ("Rank 3 failed first: it ended with SIGSEGV.", 139)


def test_a_stop_before_there_is_anything_to_save_is_no_crash():
    said = "Stopped by SIGUSR1 before there was anything to save."
    assert explain([End(0, -signal.SIGUSR1, 1.0, None)], signal.SIGUSR1, set()) == (said, 138)


def test_a_stop_that_each_rank_explains_is_said_once():
    ends = [End(rank, 143, 1.0, "Stopped by SIGTERM after step 3: nothing saved.") for rank in (1, 0)]
    assert explain(ends, signal.SIGTERM, set()) == ("Stopped by SIGTERM after step 3: nothing saved.", 143)


def test_ranks_that_could_not_save_in_time_are_named():
    ends = [End(rank, -signal.SIGKILL, 1.0, None) for rank in (1, 0)]
    assert explain(ends, signal.SIGTERM, {0, 1}) == (
        "Stopped by SIGTERM without a save: ranks 0, 1 had to be killed.",
        143,
    )


def test_a_crash_while_stopping_is_not_hidden():
    text, code = explain([End(0, 1, 1.0, "ValueError: x"), End(1, -9, 2.0, None)], signal.SIGINT, {1})
    assert code == 1
    assert "ValueError: x" in text


def hang(rank: int, number: int) -> dict:
    collectives = {"0": (number, "gloo:all_reduce"), "7": (3, "gloo:broadcast")}
    where = {"line": "a.py:1 in f: g()", "inside": "wait (b.py:2)", "host": f"node{rank}", "hosts": ["node0", "node1"]}
    return {"rank": rank, "step": 9, "collectives": collectives, **where}


def test_the_late_rank_comes_first() -> None:
    late, waiting = explain_hang([hang(0, 12), hang(1, 11)], set()).split("\nRank 0")
    assert late.startswith("Rank 1 (node1), step 9, is LATE: after gloo:all_reduce number 11 it did not join the next")
    assert "a.py:1 in f: g()" in late
    assert "waits in gloo:" in waiting


def test_a_rank_that_could_not_even_say_where_it_is() -> None:
    text = explain_hang([hang(0, 12)], {1})
    assert text.startswith("Rank 1 is LATE: its process was stopped, or hangs outside of Python.")
    assert explain_hang([], {1}) == ""


def test_ranks_of_a_machine_that_went_away() -> None:
    assert explain_hang([hang(0, 12)], set()).startswith(
        "No rank of this machine is late. Lost or late on other machines: rank 1 (node1).\n"
        "Rank 0 (node0), step 9, waits in gloo:"
    )
