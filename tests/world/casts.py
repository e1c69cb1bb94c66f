# SPDX-License-Identifier: Apache-2.0
"""Which actors meet: in whole casts, and in pairs with each plan of preemptions."""

from __future__ import annotations

from tests.support.trees import bus
from tests.world.accidents import (
    all_lost,
    clock_is_set,
    disk_full,
    lock_dir_lost,
    pid_is_reused,
    quarantined,
    reboot,
    records_lost,
    shepherd_dies,
    straggler,
)
from tests.world.actors import (
    Cast,
    gpulockd,
    next_run,
    reap,
    run_claim,
    sge_job,
    slurm_job,
    user_release,
)
from tests.world.kernel import FREEZE, KILL
from tests.world.site import OTHER

# Where nothing else is chosen, the first that can goes on, in the order in which a cast names them.
SGE = sge_job(11, 1)
SHARD = slurm_job(21, 1, shard=True)
SHARE = run_claim(1, share=True)
SGE_SHARE = sge_job(31, 1, asks="gpu_share")
OTHERS = run_claim(1, share=True, user=OTHER)
SHELL = run_claim(1, "shell", True)
CASTS: dict[str, Cast] = {
    "two_jobs": Cast(one=SGE, two=sge_job(12, 2)),
    "straggler": Cast(
        one=sge_job(11, 1, lingers=True), d=gpulockd(2), two=sge_job(12, 2), end=straggler()
    ),
    "shepherd_dies": Cast(one=SGE, end=shepherd_dies(), d=gpulockd(2), two=sge_job(12, 2, runs=2)),
    "gpulockd_and_reap": Cast(one=sge_job(11, 2), d=gpulockd(2), root=reap(), two=sge_job(12, 1)),
    "rerun": Cast(one=sge_job(11, 2, runs=2), d=gpulockd(1), two=sge_job(12, 1, runs=2)),
    "slurm": Cast(one=slurm_job(21, 1, first=0), d=gpulockd(2), two=slurm_job(22, 1, first=1)),
    "slurm_straggler": Cast(
        one=slurm_job(21, 1, lingers=True), root=reap(), two=slurm_job(22, 2), end=straggler()
    ),
    "slurm_requeued": Cast(
        one=slurm_job(21, 1, late=True), d=gpulockd(2), two=next_run(slurm_job(21, 1, restart=1))
    ),
    "slurm_step_dies": Cast(one=slurm_job(21, 2), end=shepherd_dies("slurmstepd"), d=gpulockd(2)),
    "slurm_shards": Cast(one=SHARD, d=gpulockd(2), two=slurm_job(22, 1, shard=True)),
    "slurm_shards_and_a_card": Cast(
        one=slurm_job(21, 1, shard=True, lingers=True),
        d=gpulockd(2),
        two=slurm_job(22, 1, shard=True),
        whole=slurm_job(23, 1),
        end=straggler(),
    ),
    "commands": Cast(one=run_claim(1), d=gpulockd(2), two=run_claim(2)),
    "command_not_found": Cast(one=run_claim(1, found=False), d=gpulockd(2), two=run_claim(2)),
    "release_by_user": Cast(
        one=run_claim(1, "shell", True), user=user_release(), d=gpulockd(1), two=run_claim(2)
    ),
    "release_of_a_part": Cast(
        one=run_claim(2, "shell", True), user=user_release(True), d=gpulockd(2), two=run_claim(1)
    ),
    "shares": Cast(one=SHARE, two=SHARE, three=SHARE, d=gpulockd(2)),
    "shares_of_two_users": Cast(
        one=SHARE,
        end=shepherd_dies("gpulock"),
        two=OTHERS,
        d=gpulockd(2),
        three=sge_job(33, 1, lingers=True, asks="gpu_share", user=OTHER),
    ),
    "shares_and_cards": Cast(
        one=SHARE, two=sge_job(11, 2), d=gpulockd(2), three=SHARE, root=reap()
    ),
    "sge_shares": Cast(
        one=SGE_SHARE,
        two=sge_job(32, 2, asks="gpu_share"),
        d=gpulockd(2),
        three=sge_job(33, 1, lingers=True, asks="gpu_share"),
        end=straggler(),
    ),
    "sge_shares_and_cards": Cast(
        one=sge_job(31, 1, runs=2, asks="gpu_share"),
        end=shepherd_dies(),
        d=gpulockd(2),
        two=SHARE,
        whole=sge_job(12, 2),
    ),
    "a_whole_job_and_a_share": Cast(whole=sge_job(12, 2), one=SHARE),
    "shares_die": Cast(
        one=SHARE, end=shepherd_dies("gpulock"), two=run_claim(2, share=True), d=gpulockd(2)
    ),
    "shares_and_a_reboot": Cast(one=SHARE, two=SHARE, power=reboot(), d=gpulockd(2)),
    "shares_and_a_quarantine": Cast(
        one=SHARE, root=quarantined(bus(1)), two=SHARE, d=gpulockd(1), whole=sge_job(11, 1)
    ),
    "clock_is_set": Cast(one=SGE, root=clock_is_set(-5000.0), d=gpulockd(2), two=run_claim(1)),
    "state_is_full": Cast(one=SGE, disk=disk_full("state"), d=gpulockd(2), two=run_claim(1)),
    "lock_dir_is_full": Cast(one=slurm_job(21, 1), disk=disk_full("run"), d=gpulockd(2), two=SGE),
    "reboot": Cast(one=SGE, power=reboot(), d=gpulockd(2), two=run_claim(1)),
    "reboot_on_a_disk": Cast(
        one=slurm_job(21, 1), power=reboot(True), d=gpulockd(2), two=run_claim(1)
    ),
    "pid_is_reused": Cast(one=SGE, other=pid_is_reused(), d=gpulockd(2), two=sge_job(12, 2)),
}
LOST: dict[str, Cast] = {
    "lock_dir": Cast(one=SGE, root=lock_dir_lost(), two=run_claim(1), d=gpulockd(2)),
    "lock": Cast(
        one=SGE, root=lock_dir_lost(f"/locks/{bus(0)}"), two=sge_job(12, 1), d=gpulockd(2)
    ),
    "slurm": Cast(one=slurm_job(21, 1), root=lock_dir_lost(), two=run_claim(1), d=gpulockd(2)),
    "locks": Cast(one=SGE, root=lock_dir_lost("/locks"), two=sge_job(12, 1), d=gpulockd(2)),
    "slurm_shards": Cast(
        one=SHARD, root=lock_dir_lost(), two=slurm_job(22, 1, shard=True), d=gpulockd(2)
    ),
    "a_share": Cast(
        one=SHARD,
        root=lock_dir_lost(f"/locks/{bus(0)}.share1"),
        two=slurm_job(22, 1, shard=True),
        d=gpulockd(2),
    ),
    "shares": Cast(one=SHARE, root=lock_dir_lost(), two=SHARE, d=gpulockd(2)),
    "shares_of_two_users": Cast(
        one=SHARE, root=lock_dir_lost(f"/locks/{bus(1)}.share1"), two=OTHERS, d=gpulockd(2)
    ),
    "a_place": Cast(
        one=SHARE, root=lock_dir_lost(f"/locks/{bus(1)}.share1"), two=SHARE, d=gpulockd(2)
    ),
    "locks_and_reap": Cast(
        one=run_claim(2), root=lock_dir_lost("/locks"), reaper=reap(), two=sge_job(12, 1)
    ),
    "lock_dir_and_a_later_job": Cast(
        one=SGE, root=lock_dir_lost(), d=gpulockd(2), two=sge_job(12, 2)
    ),
    "records": Cast(one=SGE, root=records_lost(), two=sge_job(12, 1), d=gpulockd(2)),
    "records_of_slurm": Cast(
        one=slurm_job(21, 1), root=records_lost(), two=run_claim(1), d=gpulockd(2)
    ),
    "the_folder_of_records": Cast(
        one=SHELL, root=all_lost(False), two=sge_job(12, 1), d=gpulockd(2)
    ),
    "both_folders": Cast(one=SHELL, root=all_lost(), two=run_claim(1), d=gpulockd(2)),
    "part_and_lock_dir": Cast(
        one=run_claim(2, "shell", True),
        user=user_release(True),
        root=lock_dir_lost(),
        d=gpulockd(2),
    ),
}
PAIRS: dict[str, Cast] = {
    "jobs": Cast(one=sge_job(11, 2), two=sge_job(12, 2)),
    "commands": Cast(one=run_claim(2), two=run_claim(2)),
    "slurm_jobs": Cast(one=slurm_job(21, 1), two=slurm_job(22, 1)),
    "slurm_shards": Cast(one=SHARD, two=slurm_job(22, 1, shard=True)),
    "slurm_shard_and_card": Cast(one=SHARD, two=slurm_job(22, 1)),
    "shares": Cast(one=SHARE, two=SHARE),
    "shares_of_two_users": Cast(one=SHARE, two=OTHERS),
    "share_and_cards": Cast(one=SHARE, two=sge_job(11, 2)),
    "sge_share_and_card": Cast(one=SGE_SHARE, two=sge_job(12, 2)),
    "job_and_gpulockd": Cast(one=sge_job(11, 1), two=gpulockd(1)),
    "slurm_job_and_reap": Cast(one=slurm_job(21, 1), two=reap()),
    "command_and_gpulockd": Cast(one=run_claim(1), two=gpulockd(1)),
    "gpulockd_and_reap": Cast(one=gpulockd(1), two=reap()),
    "release_and_claim": Cast(one=run_claim(1, "shell", True), two=user_release()),
}
# An actor, and what happens at each of its calls: it is killed or stopped, or another one acts.
POINTS: tuple[tuple[str, str, str], ...] = (
    ("two_jobs", "one", KILL),
    ("two_jobs", "one", FREEZE),
    ("shepherd_dies", "one", FREEZE),
    ("shepherd_dies", "one", "end"),
    ("straggler", "one", FREEZE),
    ("rerun", "one", KILL),
    ("gpulockd_and_reap", "d", KILL),
    ("gpulockd_and_reap", "d", FREEZE),
    ("gpulockd_and_reap", "root", FREEZE),
    ("slurm", "one", FREEZE),
    ("slurm_straggler", "one", KILL),
    ("slurm_requeued", "one", FREEZE),
    ("slurm_requeued", "one", "two"),
    ("slurm_step_dies", "one", "end"),
    ("slurm_shards", "one", KILL),
    ("slurm_shards", "one", FREEZE),
    ("slurm_shards", "two", KILL),
    ("slurm_shards_and_a_card", "two", KILL),
    ("slurm_shards_and_a_card", "whole", KILL),
    ("commands", "one", KILL),
    ("commands", "two", FREEZE),
    ("shares", "one", KILL),
    ("shares", "two", FREEZE),
    ("shares_of_two_users", "one", KILL),
    ("shares_of_two_users", "two", FREEZE),
    ("shares_of_two_users", "two", "end"),
    ("shares_and_cards", "one", KILL),
    ("shares_and_cards", "two", FREEZE),
    ("sge_shares", "one", KILL),
    ("sge_shares", "two", FREEZE),
    ("sge_shares_and_cards", "one", "end"),
    ("shares_die", "two", "end"),
    ("shares_and_a_reboot", "two", "power"),
    ("shares_and_a_quarantine", "two", "root"),
    ("command_not_found", "one", KILL),
    ("command_not_found", "one", FREEZE),
    ("release_by_user", "user", KILL),
    ("release_by_user", "user", FREEZE),
    ("release_of_a_part", "user", KILL),
    ("release_of_a_part", "user", FREEZE),
    ("clock_is_set", "one", "root"),
    ("state_is_full", "one", "disk"),
    ("state_is_full", "two", "disk"),
    ("lock_dir_is_full", "one", "disk"),
    ("lock_dir_is_full", "two", "disk"),
    ("reboot", "one", "power"),
    ("reboot", "d", "power"),
    ("reboot_on_a_disk", "one", "power"),
    ("reboot_on_a_disk", "two", "power"),
    ("pid_is_reused", "one", "other"),
)
LOST_POINTS: tuple[tuple[str, str, str], ...] = tuple(
    (cast, actor, FREEZE) for cast in LOST for actor in LOST[cast].plays if actor != "root"
)
