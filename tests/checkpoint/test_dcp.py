"""How tensors are written."""

from titanlite.checkpoint.dcp import CommittingWriter


def test_a_writer_in_the_background_never_waits_for_the_stream_of_the_training(tmp_path):
    writer = CommittingWriter(tmp_path, 1, "token", {})
    assert writer.per_thread_copy_ahead == 0  # or DCP copies "ahead" what is on the CPU, and waits for a GPU each time
