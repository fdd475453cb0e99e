/* A distance for loopback connections: every byte, each way, arrives DELAY_US after it was sent. Order and bytes stay as they are.
 *
 *     delayproxy TARGET_PORT DELAY_US      prints the port that it listens on, and serves until its standard input ends
 *
 * One thread. ppoll takes nanoseconds, and a timer slack of 1 ns keeps the kernel from adding its usual 50 us.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 64, READ_BYTES = 1 << 18, NANOSECONDS = 1000000000 };

struct piece { /* what one read brought; size 0: the sender has closed */
    struct piece *next;
    int64_t due;
    size_t size, sent;
    char bytes[];
};

struct way { /* one direction of one connection */
    int from, to;
    int ended; /* nothing more is read */
    int blocked; /* the receiver takes no more for now */
    struct piece *first, *last;
};

static struct way ways[2 * MAX_CONNECTIONS];
static size_t num_ways;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * NANOSECONDS + time.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void prepare(int descriptor) {
    int one = 1;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (fcntl(descriptor, F_SETFL, O_NONBLOCK) < 0)
        fail("fcntl");
}

static void open_ways(int listener, const struct sockaddr_in *target) {
    int client = accept(listener, NULL, NULL), server;
    if (client < 0)
        return;
    server = socket(AF_INET, SOCK_STREAM, 0);
    if (num_ways == 2 * MAX_CONNECTIONS || server < 0 || connect(server, (const struct sockaddr *)target, sizeof *target) < 0) {
        close(client);
        if (server >= 0)
            close(server);
        return;
    }
    prepare(client);
    prepare(server);
    ways[num_ways++] = (struct way){.from = client, .to = server};
    ways[num_ways++] = (struct way){.from = server, .to = client};
}

static void take(struct way *way, int64_t delay) {
    static char buffer[READ_BYTES];
    ssize_t size = recv(way->from, buffer, sizeof buffer, 0);
    struct piece *piece;
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size < 0)
        size = 0; /* a broken connection ends like a closed one */
    piece = malloc(sizeof *piece + (size_t)size);
    if (piece == NULL)
        fail("malloc");
    *piece = (struct piece){.due = now() + delay, .size = (size_t)size};
    memcpy(piece->bytes, buffer, (size_t)size);
    if (way->last != NULL)
        way->last->next = piece;
    else
        way->first = piece;
    way->last = piece;
    way->ended = size == 0;
}

static void give(struct way *way) {
    way->blocked = 0;
    while (way->first != NULL && way->first->due <= now()) {
        struct piece *piece = way->first;
        if (piece->size == 0) {
            shutdown(way->to, SHUT_WR);
        } else {
            ssize_t sent = send(way->to, piece->bytes + piece->sent, piece->size - piece->sent, MSG_NOSIGNAL);
            if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
                way->blocked = 1;
                return;
            }
            piece->sent += sent < 0 ? piece->size - piece->sent : (size_t)sent; /* nobody is left to get it */
            if (piece->sent < piece->size)
                continue;
        }
        way->first = piece->next;
        if (way->first == NULL)
            way->last = NULL;
        free(piece);
    }
}

int main(int count, char **arguments) {
    struct sockaddr_in target = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in own = target;
    socklen_t size = sizeof own;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    int64_t delay;
    if (count != 3) {
        fprintf(stderr, "usage: delayproxy TARGET_PORT DELAY_US\n");
        return 2;
    }
    target.sin_port = htons((uint16_t)atoi(arguments[1]));
    delay = atoll(arguments[2]) * 1000;
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&own, sizeof own) < 0 || listen(listener, 16) < 0)
        fail("listen");
    getsockname(listener, (struct sockaddr *)&own, &size);
    printf("%d\n", ntohs(own.sin_port));
    fflush(stdout);
    for (;;) {
        struct pollfd polled[2 + 4 * MAX_CONNECTIONS];
        struct timespec wait;
        size_t before = num_ways;
        int64_t due = INT64_MAX, left;
        polled[0] = (struct pollfd){.fd = listener, .events = POLLIN};
        polled[1] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
        for (size_t each = 0; each < num_ways; each++) {
            struct way *way = &ways[each];
            polled[2 + 2 * each] = (struct pollfd){.fd = way->ended ? -1 : way->from, .events = POLLIN};
            polled[3 + 2 * each] = (struct pollfd){.fd = way->blocked ? way->to : -1, .events = POLLOUT};
            if (way->first != NULL && !way->blocked && way->first->due < due)
                due = way->first->due;
        }
        left = due == INT64_MAX ? 0 : due - now();
        if (left < 0)
            left = 0;
        wait = (struct timespec){.tv_sec = left / NANOSECONDS, .tv_nsec = left % NANOSECONDS};
        if (ppoll(polled, 2 + 2 * before, due == INT64_MAX ? NULL : &wait, NULL) < 0 && errno != EINTR)
            fail("ppoll");
        if (polled[1].revents) {
            char byte;
            if (read(STDIN_FILENO, &byte, 1) <= 0)
                return 0;
        }
        for (size_t each = 0; each < before; each++) {
            if (polled[2 + 2 * each].revents)
                take(&ways[each], delay);
            give(&ways[each]);
        }
        if (polled[0].revents)
            open_ways(listener, &target);
    }
}
