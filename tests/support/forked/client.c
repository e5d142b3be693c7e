/* Stands in for `python`: has the fork server run the words that follow, see __init__.py. SOCKET is the server's
   address, PYTHON the path of the real one, OF_SERVER a list of variables that the server has, too. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int begins(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

/* Variables that are read while Python or its libraries are loaded, when the server had others. */
static int must_be_read_early(const char *variable) {
    static const char *const harmless[] = {"PYTHONPATH=", "PYTHONUNBUFFERED=", "PYTHONDONTWRITEBYTECODE=",
                                           "OMP_NUM_THREADS=",
                                           "TORCHINDUCTOR_CACHE_DIR=" /* torch sets it itself */,
                                           /* torchrun's own, and what it sets; read when ranks meet */
                                           "TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING="};
    static const char *const early[] = {"PYTHON", "LD_", "TORCH", "PYTORCH", "OMP_", "GOMP_", "KMP_", "MKL_",
                                        "OPENBLAS_", "MALLOC_"};
    static const char *const of_server[] = {OF_SERVER ""};
    for (size_t i = 0; i < sizeof of_server / sizeof *of_server; i++)
        if (strcmp(variable, of_server[i]) == 0) return 0;
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++)
        if (begins(variable, harmless[i])) return 0;
    for (size_t i = 0; i < sizeof early / sizeof *early; i++)
        if (begins(variable, early[i])) return 1;
    return 0;
}

/* Whether the server can run it: [-u] (-m MODULE | -c CODE | SCRIPT) WORDS, with one thread, as the server has. */
static int can_be_forked(int argc, char **argv) {
    int first = argc > 1 && strcmp(argv[1], "-u") == 0 ? 2 : 1;
    const char *threads = getenv("OMP_NUM_THREADS");
    if (first >= argc || threads == NULL || strcmp(threads, "1") != 0) return 0;
    if (strcmp(argv[first], "-m") == 0 || strcmp(argv[first], "-c") == 0) {
        if (first + 1 >= argc) return 0;
    } else if (argv[first][0] == '-') {
        return 0;
    }
    for (char **variable = environ; *variable; variable++)
        if (must_be_read_early(*variable)) return 0;
    return 1;
}

static void fail(const char *what) {
    fprintf(stderr, "fork server: %s: %s\n", what, errno ? strerror(errno) : "it has ended");
    exit(125);
}

/* Connect, and pass on the signal mask and the standard streams. The server finds the rest in /proc. */
static int ask(const sigset_t *mask) {
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {AF_UNIX, SOCKET};
    if (server < 0 || connect(server, (struct sockaddr *)&address, sizeof address)) fail("connect");
    int streams[3] = {0, 1, 2};
    union {
        char bytes[CMSG_SPACE(sizeof streams)];
        struct cmsghdr aligned;
    } control;
    memset(&control, 0, sizeof control);
    struct iovec data = {(void *)mask, 8};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof streams);
    memcpy(CMSG_DATA(header), streams, sizeof streams);
    if (sendmsg(server, &message, MSG_NOSIGNAL) != 8) fail("sendmsg");
    return server;
}

static int32_t number_from(int server) {
    int32_t number;
    errno = 0;
    if (recv(server, &number, sizeof number, MSG_WAITALL) != sizeof number) fail("recv");
    return number;
}

/* End as the process has ended. */
static void end(int status) {
    if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none); /* the process has written its core file */
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, WTERMSIG(status));
    signal(WTERMSIG(status), SIG_DFL);
    kill(getpid(), WTERMSIG(status));
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    _exit(128 + WTERMSIG(status));
}

int main(int argc, char **argv) {
    sigset_t all, mask;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &mask); /* what arrives from here on waits for the process */
    if (!can_be_forked(argc, argv)) {
        sigprocmask(SIG_SETMASK, &mask, NULL);
        argv[0] = (char *)PYTHON;
        execv(PYTHON, argv);
        fail("exec " PYTHON);
    }
    int server = ask(&mask), signals = signalfd(-1, &all, SFD_CLOEXEC);
    pid_t process = number_from(server);
    struct pollfd either[2] = {{server, POLLIN, 0}, {signals, POLLIN, 0}};
    for (;;) {
        if (poll(either, 2, -1) < 0) fail("poll");
        if (either[0].revents) end(number_from(server));
        struct signalfd_siginfo got;
        if (read(signals, &got, sizeof got) == sizeof got) kill(process, got.ssi_signo);
    }
}
