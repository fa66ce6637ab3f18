# Functions shared by the scripts of this folder. Source it.
# shellcheck shell=bash

# Run a command, or only print it if DRY_RUN is set.
run() {
	if [ -n "${DRY_RUN:-}" ]; then
		printf '+'
		printf ' %q' "$@"
		printf '\n'
	else
		"$@"
	fi
}

# Exit with status 2 unless every named variable has a value.
need() {
	local name
	for name in "$@"; do
		if [ -z "${!name:-}" ]; then
			echo "$0: $name is not set; see the top of the script" >&2
			exit 2
		fi
	done
}

# Exit with status 2 unless WORKDIR is remote storage: a local disk is lost with its host, and the
# other hosts of a slice do not see it.
need_remote_workdir() {
	if [[ $WORKDIR != *://* || $WORKDIR == file:* ]]; then
		echo "$0: WORKDIR $WORKDIR: is not in a bucket; give one such as gs://bucket/runs/name" >&2
		exit 2
	fi
}

# Exit with status 2 unless a program is installed; a dry run needs none.
program() {
	if [ -z "${DRY_RUN:-}" ] && ! command -v "$1" >/dev/null; then
		echo "$0: $1 is not installed; $2" >&2
		exit 2
	fi
}
