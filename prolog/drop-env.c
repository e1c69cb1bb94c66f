// SPDX-License-Identifier: Apache-2.0
// Start a hook of Grid Engine: drop-env HOOK JOB TASK QUEUE [OWNER [USER@]COMMAND ...]
//
// The shepherd gives a hook the job's environment and limits. The loader and the C library of any
// ordinary program obey that environment before the program runs: GLIBC_TUNABLES alone ends it, and
// Grid Engine puts the queue in error. So this program has neither a loader nor a C library.
//
// It starts HOOK as `HOOK SHEPHERD [OWNER COMMAND...]` without the job's limits, in an
// environment of its own. Of the job's it keeps five names, which the shepherd writes and no program
// obeys. OWNER and COMMAND are the site's own hook, which ours starts. Where ours cannot be run, the
// site's epilog runs all the same. Where root may not lift limits, the job is at fault.
//
// The hook reads in GPULOCK_LIMITS what the limits were, which the site's hook gets again, and in
// GPULOCK_LIMITED that one stays. Into the pipe GPULOCK_ANSWERS it writes a byte once it has the
// site's hook in hand, and a second that the site's epilog ended with.
typedef unsigned long word;

#if defined __x86_64__
enum {
	READ = 0, WRITE = 1, SIGACTION = 13, SOCKET = 41, SENDTO = 44, CLONE = 56, EXECVE = 59,
	EXIT = 60, WAIT4 = 61, FCNTL = 72, GETPPID = 110, PPOLL = 271, PIPE2 = 293, PRLIMIT = 302
};
__asm__(".globl _start\n_start: mov %rsp, %rdi\n and $-16, %rsp\n call begin\n");
static long kernel(long call, const word given[6])
{
	register word r10 __asm__("r10") = given[3], r8 __asm__("r8") = given[4];
	register word r9 __asm__("r9") = given[5];
	__asm__ volatile("syscall" : "+a"(call)
		: "D"(given[0]), "S"(given[1]), "d"(given[2]), "r"(r10), "r"(r8), "r"(r9)
		: "rcx", "r11", "memory");
	return call;
}
#elif defined __aarch64__
enum {
	READ = 63, WRITE = 64, SIGACTION = 134, SOCKET = 198, SENDTO = 206, CLONE = 220, EXECVE = 221,
	EXIT = 93, WAIT4 = 260, FCNTL = 25, GETPPID = 173, PPOLL = 73, PIPE2 = 59, PRLIMIT = 261
};
__asm__(".globl _start\n_start: mov x0, sp\n bl begin\n");
static long kernel(long call, const word given[6])
{
	register long x8 __asm__("x8") = call;
	register word x0 __asm__("x0") = given[0], x1 __asm__("x1") = given[1];
	register word x2 __asm__("x2") = given[2], x3 __asm__("x3") = given[3];
	register word x4 __asm__("x4") = given[4], x5 __asm__("x5") = given[5];
	__asm__ volatile("svc #0" : "+r"(x0)
		: "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return (long)x0;
}
#else
#error "drop-env is for x86_64 and aarch64 alone"
#endif
#define KERNEL(call, ...) kernel(call, (const word[6]){ __VA_ARGS__ })

enum { DONE = 0, QUEUE_ERROR = 1, REQUEUE = 99, JOB_ERROR = 100, NOT_STARTED = 127, SIGNALLED = 128 };
enum { IGNORE = 1, SIGPIPE = 13, SIGCHLD = 17, SIGXFSZ = 25, STACK = 3, DUPLICATE = 0 };
enum { NONBLOCK = 04000, CLOEXEC = 02000000, UNIX = 1, DATAGRAM = 2, DONTWAIT = 0x40, POLLOUT = 4 };
static const word UNLIMITED = -1UL, STACK_BYTES = 8 << 20;
static const struct { word number; const char *option; } LIMITS[] = { // as prlimit(1) names them
	{ 9, "--as=" }, { 2, " --data=" }, { 1, " --fsize=" }, { 0, " --cpu=" }, { STACK, " --stack=" }
};
static const char *const KEPT[] = {
	"SGE_JOBEXIT_STAT=", "SGE_CWD_PATH=", "SGE_STDIN_PATH=", "SGE_STDOUT_PATH=", "SGE_STDERR_PATH="
};
enum { LIMITS_COUNT = sizeof LIMITS / sizeof *LIMITS, KEPT_COUNT = sizeof KEPT / sizeof *KEPT };

static char text[1 << 14], *end = text; // strings, each with a zero behind it

static void add(const char *part)
{
	while (*part && end < text + sizeof text - 2)
		*end++ = *part++;
}

static char *begin_string(const char *part)
{
	char *start = end == text ? end : ++end;

	add(part);
	return start;
}

static const char *decimal(word number)
{
	static char digits[21];
	char *first = digits + sizeof digits - 1;

	do
		*--first = (char)('0' + number % 10);
	while (number /= 10);
	return first;
}

static char *variable(const char *name, const char *value)
{
	char *start = begin_string(name);

	add(value);
	return start;
}

static int begins(const char *whole, const char *part)
{
	while (*part && *whole == *part)
		whole++, part++;
	return !*part;
}

static _Noreturn void leave(int code)
{
	for (;;)
		KERNEL(EXIT, (word)code);
}

static void say(int to_log, const char *const *parts) // to the job, and what is its node's to the log
{
	static const struct { unsigned short family; char path[9]; } LOG = { UNIX, "/dev/log" };
	static const word now[2];
	struct { int fd; short events, ready; } output = { 2, POLLOUT, 0 };
	char *line = begin_string("<27>gpulock: "); // daemon.err

	while (*parts)
		add(*parts++);
	if (to_log) // a log whose reader is stuck takes none
		KERNEL(SENDTO, (word)KERNEL(SOCKET, UNIX, DATAGRAM), (word)line, (word)(end - line),
			DONTWAIT, (word)&LOG, sizeof LOG);
	add("\n");
	if (KERNEL(PPOLL, (word)&output, 1, (word)now) > 0) // nor a pipe that nobody reads
		KERNEL(WRITE, 2, (word)(line + 4), (word)(end - line - 4));
}
#define SAY(to_log, ...) say(to_log, (const char *const[]){ __VA_ARGS__, 0 })

static void say_gone(const char *hook) // as where an upgrade of the distribution took its Python
{
	SAY(1, hook, " cannot be started (is its interpreter there?), so no job can: "
		"run gpulock install sge again");
}

static int lift_limits(void) // false where one stays; adds what they were
{
	int lifted = 1;

	for (int n = 0; n < LIMITS_COUNT; n++) {
		struct { word soft, hard; } old, new = { UNLIMITED, UNLIMITED };

		KERNEL(PRLIMIT, 0, LIMITS[n].number, 0, (word)&old);
		if (LIMITS[n].number == STACK) { // its hard one stays for the site's hook
			new.soft = STACK_BYTES;
			new.hard = old.hard < STACK_BYTES ? STACK_BYTES : old.hard;
		}
		lifted &= !KERNEL(PRLIMIT, 0, LIMITS[n].number, (word)&new);
		add(LIMITS[n].option);
		add(decimal(old.soft));
		add(":");
		add(decimal(old.hard));
	}
	return lifted;
}

static long start(char **command, char **env)
{
	long pid = KERNEL(CLONE, SIGCHLD);

	if (pid)
		return pid;
	KERNEL(EXECVE, (word)*command, (word)command, (word)env);
	leave(NOT_STARTED);
}

static int exit_code(long pid)
{
	int status = 0;

	KERNEL(WAIT4, (word)pid, (word)&status);
	return status & 127 ? SIGNALLED + (status & 127) : status >> 8 & 255;
}

static _Noreturn void run_site(char **owner, char **env) // without any variable of the job
{
	char **command = owner - 3, *user = *owner, *program = owner[1], *at = program;

	while (*at && *at != '@')
		at++;
	if (*at) {
		*at = 0;
		user = program;
		program = at + 1;
	}
	command[0] = "/usr/sbin/runuser";
	command[1] = "-u";
	command[2] = user;
	command[3] = "--";
	command[4] = program;
	KERNEL(EXECVE, (word)*command, (word)command, (word)env);
	leave(NOT_STARTED);
}

// Stay above a hook, and answer for it: of an epilog Grid Engine must see 0, or the job runs again;
// a prolog that somebody killed, as the kernel does where memory is short, stops no queue.
static _Noreturn void watch(char **command, char **env, char **last, int epilog, int limited)
{
	const char *job = command[-1], *site = command[2] ? command[3] : 0;
	unsigned char answers[2]; // of the hook: that it has the site's in hand, and how that ended
	int ends[2], code;
	long answered, pid = KERNEL(PIPE2, (word)ends, NONBLOCK | CLOEXEC);

	if (pid == 0) {
		*last = variable("GPULOCK_ANSWERS=",
			decimal((word)KERNEL(FCNTL, (word)ends[1], DUPLICATE)));
		pid = start(command, env);
	}
	if (pid < 0) {
		SAY(0, "job ", job, ": no process can be started here now, as all of them are taken");
		leave(epilog ? DONE : REQUEUE);
	}
	code = exit_code(pid);
	answered = KERNEL(READ, (word)ends[0], (word)answers, sizeof answers);
	if (!epilog && (answered > 0 || code == DONE || code == REQUEUE || code == JOB_ERROR))
		leave(code);
	if (!epilog && !limited && code > SIGNALLED) {
		SAY(1, "job ", job, ": its prolog was ended by signal ",
			decimal((word)code - SIGNALLED), ", so the job goes back to the queue");
		leave(REQUEUE);
	}
	if (!epilog && !limited && code == NOT_STARTED) {
		say_gone(*command);
		leave(QUEUE_ERROR);
	}
	if (!epilog && !limited)
		leave(code);
	if (!epilog) {
		SAY(0, "job ", job, ": invalid request: its own limits leave its prolog no room "
			"(it ended with ", decimal((word)code), "); ask for h_vmem of 64M or more");
		leave(JOB_ERROR);
	}
	if (code == NOT_STARTED && !limited)
		say_gone(*command);
	if (site && answered <= 0)
		run_site(command + 2, env);
	leave(site && answered > 1 ? answers[1] : DONE);
}

_Noreturn void begin(word *stack)
{
	static const word ignored[4] = { IGNORE };
	static char *env[KEPT_COUNT + 8], *kept[KEPT_COUNT];
	char **words = (char **)(stack + 1), **given = words + *stack + 1, **command = words + 3;
	char *hook = words[1], *epilog = hook, **next = env;
	int limited;

	if (*stack < 5)
		leave(JOB_ERROR);
	KERNEL(SIGACTION, SIGPIPE, (word)ignored, 0, 8); // a message without a reader is lost,
	KERNEL(SIGACTION, SIGXFSZ, (word)ignored, 0, 8); // and one without room
	while (*epilog && !begins(epilog, "/epilog/"))
		epilog++;
	*next++ = "PATH=/usr/bin:/bin";
	*next++ = variable("JOB_ID=", words[2]);
	*next++ = variable("SGE_TASK_ID=", words[3]);
	*next++ = variable("QUEUE=", words[4]);
	*next++ = begin_string("GPULOCK_LIMITS=");
	limited = !lift_limits();
	if (limited)
		*next++ = "GPULOCK_LIMITED=1";
	for (; *given; given++)
		for (int n = 0; n < KEPT_COUNT; n++)
			if (begins(*given, KEPT[n]))
				kept[n] = *given; // the last of each name
	for (int n = 0; n < KEPT_COUNT; n++)
		if (kept[n])
			*next++ = kept[n];
	command[0] = hook;
	command[1] = begin_string(decimal((word)KERNEL(GETPPID, 0)));
	watch(command, env, next, *epilog, limited);
}
