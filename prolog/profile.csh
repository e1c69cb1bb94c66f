# SPDX-License-Identifier: Apache-2.0
# The GPUs of a qlogin for csh and tcsh, as gpulock.sh has them for other shells.
#
# /etc/profile.d/gpulock.csh, and /etc/csh/login.d/gpulock.csh where Debian's csh.login reads that.
# gpulock.sh prints a line with a name and one of `=` with its value, for each variable.
if ( ! $?GPULOCK_DEVICES && -r @PROFILE@ ) then
	foreach gpulock_word ( "`/usr/bin/env _gpulock_csh=1 /bin/sh @PROFILE@`" )
		if ( "$gpulock_word:q" =~ =* ) then
			setenv $gpulock_name "$gpulock_word:s/=//:q"
		else
			set gpulock_name = "$gpulock_word:q"
		endif
	end
	unset gpulock_word gpulock_name
endif
