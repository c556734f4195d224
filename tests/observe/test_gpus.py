"""GPUs are found by device names, by names as users write them, and in user files."""

import pytest
from small_runs import job_tables

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe import gpus
from titanlite.observe.gpus import find_gpu, gpu_of_device, known_gpus, peak_flops

GPU_FILE = """
name = "mine"
memory_gib = 24
bf16 = 100.0
fp32 = 20
bandwidth = 1000
link = 32
network = 10
cpu_link = 32
gpus_per_node = 2
"""


@pytest.mark.parametrize(
    ("device", "name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 989),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe", 312),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2),
        ("AMD Instinct MI300X", "MI300X", 1307),
        ("cpu", None, None),
        ("Tesla V100-SXM2-16GB", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("H1000", None, None),
    ],
)
def test_a_gpu_is_found_by_its_device_name(device, name, tera):
    assert getattr(gpu_of_device(device), "name", None) == name
    assert peak_flops(device) == (None if tera is None else tera * 1e12)


def normalize(name: str) -> str:
    return name.upper().replace(" ", "-")


def test_a_gpu_is_found_by_any_spelling_and_never_mistaken_for_a_similar_one():
    names = [gpu.name for gpu in known_gpus()]
    assert len(set(names)) == len(names) >= 9

    for name in (*names, "h100", "H100-PCIe", "h100 pcie", "A100-80GB", "RTX-4090"):
        assert normalize(find_gpu(name).name) == normalize(name)


def test_a_gpu_file_with_former_key_names_is_read(tmp_path, caplog):
    file = tmp_path / "mine.toml"
    file.write_text(GPU_FILE.replace("cpu_link", "host").replace("gpus_per_node", "machine"))

    gpu = find_gpu(str(file))

    assert (gpu.cpu_link, gpu.gpus_per_node) == (32, 2)
    assert "host is now called cpu_link." in caplog.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("bf16 = 100.0", ""), "bf16 is required"),
        (("bf16 = 100.0", "bf16 = -1.0"), "bf16 must be"),
        (("bf16 = 100.0", "bf17 = 100.0"), "bf17 is unknown"),
        (("bf16 = 100.0", "bf16 = "), "not valid TOML"),
    ],
)
def test_a_mistake_in_a_gpu_file_is_an_error_that_names_it(tmp_path, change, problem):
    file = tmp_path / "mine.toml"
    file.write_text(GPU_FILE.replace(*change))

    with pytest.raises(UserError, match=problem):
        find_gpu(str(file))


def test_an_offloaded_run_needs_cpu_memory_even_if_the_memory_of_the_gpu_is_unknown(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DRIVERS", (str(tmp_path),))
    tables = job_tables("model.flavor = '405b' ; training.enable_cpu_offload = true")
    job = JobConfig.model_validate(tables)

    with pytest.raises(UserError, match="state take"):
        gpus.check_memory(Run(job))
