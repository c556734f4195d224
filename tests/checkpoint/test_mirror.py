"""Checkpoints, data, a tokenizer and a model that lie in a bucket: against a server of S3's protocol."""

import gzip
import json
import logging
import os
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from moto.server import ThreadedMotoServer
from ranks import start_small, titanlite
from small_runs import SMALL, losses


@pytest.fixture
def server(tmp_path, monkeypatch):
    logging.getLogger("werkzeug").disabled = True
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._port = server.get_host_and_port()[1]  # where it starts again
    settings = {"ACCESS_KEY_ID": "us", "SECRET_ACCESS_KEY": "us", "DEFAULT_REGION": "us-east-1", "MAX_ATTEMPTS": "1"}
    for name, value in {**settings, "ENDPOINT_URL": f"http://127.0.0.1:{server._port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    tell("reset")
    bucket().mkdir("bucket")
    yield server
    tell("reset-auth", b"inf")
    server.stop()


def tell(what: str, body: bytes = b"") -> None:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/{what}"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "text/plain"}, method="POST")).close()


def bucket():
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def there(ending: str = "") -> dict[str, bytes]:
    """What the mirror holds: path -> content."""
    storage = bucket()
    return {p.removeprefix("bucket/run/"): storage.cat(p) for p in storage.find("bucket/run") if p.endswith(ending)}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("step-*/*")}


def trained(out: Path, *words: object, ranks: int = 1, code: int = 0) -> str:
    return start_small(out, "--checkpoint.mirror", "s3://bucket/run", *words, ranks=ranks).ends_with(code)


def damage(step: int) -> None:
    """Flip a bit of an object."""
    storage, name = bucket(), f"bucket/run/step-{step:08d}/__0_0.distcp"
    content = storage.cat(name)
    storage.pipe(name, content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])


def test_another_machine_goes_on_from_the_newest_good_checkpoint_on_another_layout(server, tmp_path):
    keys = "--lr_scheduler.total_steps", 20, "--checkpoint.interval", 3, "--checkpoint.keep_latest_k", 2
    trained(tmp_path / "one", *keys, "--training.steps", 10, ranks=2)
    assert sorted(there("manifest.json")) == ["step-00000009/manifest.json", "step-00000010/manifest.json"]
    assert there() == files(tmp_path / "one/checkpoint")
    damage(10)
    assert "Resumed after step 9 " in trained(tmp_path / "two", *keys, "--training.steps", 12)
    assert losses(tmp_path / "two")[10] == pytest.approx(losses(tmp_path / "one")[10], rel=1e-5)  # sums of two ranks
    back = "--checkpoint.load_step", 9, "--training.steps", 10
    assert "Resumed after step 9 " in trained(tmp_path / "back", *keys, *back)
    assert sorted(there("manifest.json")) == ["step-00000009/manifest.json", "step-00000010/manifest.json"]
    assert "def" in titanlite("generate", "--checkpoint", "s3://bucket/run", "--prompt", "def", "--max-new-tokens", 3)
    damage(9)
    damage(10)
    for _ in range(2):
        trained(tmp_path / "three", *keys, code=4)
    assert not there("manifest.json")


def test_a_copy_that_is_cut_short_is_no_checkpoint_and_is_made_by_the_next_start(server, tmp_path):
    words = "--checkpoint.mirror", "s3://bucket/run", "--training.steps", 5
    world, deadline = start_small(tmp_path / "one", *words, "--checkpoint.mirror_mbps", 0.1), time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
    world.kill(0, signal.SIGKILL)
    world.wait()
    assert there()
    assert not there("manifest.json")
    start_small(tmp_path / "one", *words).ends_with(0)
    assert there() == files(tmp_path / "one/checkpoint")


def test_a_run_goes_on_without_the_server_and_the_last_copy_decides_how_it_ends(server, tmp_path):
    words = "--checkpoint.interval", 20, "--checkpoint.keep_latest_k", 2, "--checkpoint.timeout_seconds", 2
    world = start_small(tmp_path / "one", "--checkpoint.mirror", "s3://bucket/run", "--training.steps", 10**6, *words)
    world.wait_for("step +1/")
    server.stop()
    world.wait_for("saved step 40 ")
    server.start()
    world.wait_for("copied step-")
    server.stop()
    world.kill(0, signal.SIGTERM)
    assert "s3://bucket/run" in world.ends_with(4)
    server.start()
    trained(tmp_path / "one", *words, "--training.steps", 1)
    assert there() == files(tmp_path / "one/checkpoint")


@pytest.mark.parametrize(("url", "said"), [("s3://nowhere/run", "does not exist"), ("s3://bucket/run", "Access Key Id"),
                                           ("runs/copy", "no URL")])  # fmt: skip
def test_a_mirror_that_cannot_be_used_is_said_before_the_start(server, tmp_path, url, said):
    if url == "s3://bucket/run":
        tell("reset-auth", b"0")  # from now on, keys are looked at
    words = start_small(tmp_path / "one", "--checkpoint.mirror", url).ends_with(2)
    assert "checkpoint.mirror" in words
    assert said in words
    assert "Traceback" not in words
    assert not (tmp_path / "one").exists()


def test_data_a_tokenizer_and_a_model_are_the_same_in_a_bucket(server, tmp_path):
    """One source of each kind: the rows of a run, and so its losses, are those from local files, bitwise."""
    here, remote, texts = tmp_path / "data", "s3://bucket/data", [f"text {i} " * 60 for i in range(200)]
    here.mkdir()
    for i in range(2):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[i::2])
        (here / f"{i}.jsonl").write_text(lines)
        (here / f"{i}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        (here / f"{i}.txt").write_text(lines)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts[i::2]}), here / f"{i}.parquet", row_group_size=20)
    (tmp_path / "small.toml").write_text(SMALL)
    source = "--dataset.source", "jsonl", "--dataset.path", here / "*.jsonl"
    titanlite("prepare", "--job.config_file", tmp_path / "small.toml", *source, "--out", here / "shards")
    shutil.copy("assets/tokenizer/tokenizer.model", here)
    bucket().put(str(here), "bucket", recursive=True)
    kinds = {"jsonl": "*.jsonl", "text": "*.txt", "parquet": "*.parquet", "shards": "shards"}
    seen = []
    for place, steps in ((here, 12), (remote, 10), (here, 12)):
        pairs = [*kinds.items(), ("jsonl", "*.jsonl.gz")]
        table = "".join(f'[[dataset.sources]]\nsource = "{k}"\npath = "{place}/{path}"\n' for k, path in pairs)
        job = tmp_path / "job.toml"
        job.write_text(f'{SMALL}\n[tokenizer]\npath = "{place}/tokenizer.model"\n{table}')
        out = tmp_path / ("local" if not seen else "remote")
        titanlite("train", "--job.config_file", job, "--job.dump_folder", out, "--training.steps", steps,
                  "--lr_scheduler.total_steps", 12, "--checkpoint.last_save_in_hf")  # fmt: skip
        seen.append(losses(out))
    assert seen[0] == seen[2]
    assert len(seen[1]) == 10
    bucket().put(str(tmp_path / "local/final_hf"), "bucket/model", recursive=True)
    for n, model in enumerate((tmp_path / "local/final_hf", "s3://bucket/model")):
        titanlite("import", "--hf", model, "--out", tmp_path / f"{n}")
    assert {k: v for k, v in files(tmp_path / "0").items() if k.endswith("distcp")} == {
        k: v for k, v in files(tmp_path / "1").items() if k.endswith("distcp")
    }
