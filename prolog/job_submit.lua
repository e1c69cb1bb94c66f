-- SPDX-License-Identifier: Apache-2.0
-- Beside slurm.conf at the controller, with JobSubmitPlugins=lua: Slurm cannot start a Prolog or
-- Epilog, of whatever site, whose job has a SPANK job-control variable of more than 128 KiB.
function slurm_job_submit(job, partitions, uid)
   local size = 0
   for _, text in pairs(job.spank_job_env or {}) do
      size = size + #text + 1
   end
   if size > 65536 then
      slurm.log_user("the SPANK variables of the job are too large for a Prolog")
      return slurm.ERROR
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end
