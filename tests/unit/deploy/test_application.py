"""The options with which Ray starts the actors."""

from __future__ import annotations

from deploy.placement import Bundle, RolePlacement
from deploy.ray.application import actor_options


def test_every_thread_of_a_role_on_cpu_may_use_the_planned_number_of_openmp_threads() -> None:
    options = actor_options(RolePlacement("draft", "cpu", (Bundle(0.4),), threads=2))

    assert options["runtime_env"]["env_vars"] == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    assert options["num_cpus"] == 0.4


def test_a_role_on_a_gpu_keeps_the_environment_of_the_node() -> None:
    assert actor_options(RolePlacement("target", "cuda", (Bundle(1.0, 1),), threads=1)) == {
        "num_cpus": 1.0,
        "num_gpus": 1.0,
    }


def test_a_role_without_a_model_keeps_the_environment_so_that_ray_gives_it_a_process_that_has_started() -> None:
    assert "runtime_env" not in actor_options(RolePlacement("coordinator", "cpu", (Bundle(0.1),), threads=1))
