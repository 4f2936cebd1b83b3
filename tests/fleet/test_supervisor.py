"""A crew of real processes: started again when killed, and given up with the words of who failed, and of no earlier start."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rowstead.fleet.fork_server import ForkServer
from rowstead.fleet.roster import RoleFiles
from rowstead.fleet.supervisor import RoleError, Supervisor
from rowstead.spec.fleet import FleetSpec

MODULE = "tests.fleet.small_roles"
SPEC = FleetSpec(num_sparse=1, num_dense=0, max_restarts=1)


def test_a_role_that_is_killed_too_often_is_not_said_to_have_made_the_mistake_of_an_earlier_run(tmp_path: Path) -> None:
    said: list[str] = []
    with ForkServer(tmp_path, MODULE) as nursery:
        RoleFiles(tmp_path, "sparse", 0).log.write_text("error: the loss is nan at step 7\n")
        crew = Supervisor(tmp_path, SPEC, nursery, {}, say=said.append)
        crew.start("sparse")
        for _ in range(2):
            crew.wait_ready()
            (post,) = crew.posts
            assert post.address is not None
            os.kill(post.address.pid, signal.SIGKILL)
            post.role.wait(20)
            if not said:
                crew.look()
        with pytest.raises(RoleError) as error:
            crew.look()
        crew.close()
    assert said == ["sparse 0 was killed by SIGKILL: starting it again (1 of 1)"]
    assert "sparse 0 was killed by SIGKILL, after 1 restarts" in str(error.value)
    assert "the loss is nan" not in str(error.value)
    assert not error.value.is_mistake
    assert crew.num_restarts == {"sparse": 1}


def test_a_role_that_says_what_is_wrong_ends_the_crew_with_its_words(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE) as nursery:
        crew = Supervisor(tmp_path, SPEC, nursery, {}, say=pytest.fail)
        crew.start("reader")
        with pytest.raises(RoleError, match=r"^reader 0: nothing to read$") as error:
            crew.wait_ready()
        crew.close()
    assert error.value.is_mistake
