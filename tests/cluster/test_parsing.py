"""Text of Slurm commands, and what may leak between jobs."""

import pytest

from miles.cluster.preflight import parse_nodes
from miles.cluster.slurm import parse_squeue, scrubbed
from miles.cluster.start import check_sizes
from miles.config import load_config
from miles.core import ConfigError


def test_het_components_are_one_job_in_order():
    jobs = parse_squeue("7+1|COMPLETING|node[1-2]|None\n7+0|RUNNING|node0|None\n9|CANCELLED||Dependency\n")
    assert jobs["7"].components == ("RUNNING", "COMPLETING") and jobs["7"].nodes == ("node0", "node[1-2]") and jobs["7"].active
    assert jobs["9"].state == "CANCELLED" and not jobs["9"].active


def test_a_job_is_active_while_any_component_is():
    assert parse_squeue("7+0|COMPLETED||None\n7+1|COMPLETING||None\n")["7"].active


def test_nodes_and_gpus_of_the_default_partition():
    text = "n0|gpu:4|main*\nn1|gpu:h100:8(S:0-1),shard:2|main*\nn2|(null)|main*\nn3|gpu:4|low\n"
    assert parse_nodes(text, default=True) == {"n0": 4, "n1": 8, "n2": 0}
    assert set(parse_nodes(text, default=False)) == {"n0", "n1", "n2", "n3"}


def test_a_nested_job_sees_nothing_of_the_outer_one():
    env = {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_CPU_BIND": "x", "SBATCH_QOS": "x", "PMI_FD": "3", "PMIX_RANK": "0", "MILES_EPOCH": "1"}
    assert scrubbed(env) == {"PATH": "/bin", "SLURM_CONF": "/c", "MILES_EPOCH": "1"}


def test_a_job_of_other_sizes_is_refused():
    config = load_config("configs/tiny_async.toml")
    right = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "2",
             "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"}
    check_sizes(config, right)
    with pytest.raises(ConfigError, match="the job has 4 tasks for the trainer, the config asks for 2"):
        check_sizes(config, {**right, "SLURM_NTASKS_HET_GROUP_0": "4"})


def test_a_colocated_job_of_other_sizes_is_refused():
    config = load_config("configs/tiny_colocated.toml")
    check_sizes(config, {"SLURM_JOB_NUM_NODES": "1"})
    check_sizes(config, {})
    with pytest.raises(ConfigError, match="the job has 2 nodes, the config asks for 1 with shared GPUs"):
        check_sizes(config, {"SLURM_JOB_NUM_NODES": "2"})
    with pytest.raises(ConfigError, match="1 nodes in its first component"):
        check_sizes(config, {"SLURM_JOB_NUM_NODES": "1", "SLURM_HET_SIZE": "2"})
