#!/usr/bin/env bash
# Train on Cloud TPU VMs, through a queued resource.
#
#   NAME=llama ZONE=us-east5-a TYPE=v5p-128 REPOSITORY=https://github.com/you/it.git \
#   CONFIG=llama:3-8b WORKDIR=gs://bucket/runs/llama cloud/tpu_vm.sh train
#
#   up      request the TPU, and wait until it is granted
#   setup   install the project on every host, or update it to the newest commit
#   fit     start the training on every host; it resumes from its newest checkpoint
#   train   all of these, repeated after each preemption until the training has ended
#   status  show the state of the queued resource
#   down    release the TPU: it costs money until then
#
# NAME        of the queued resource and its node
# ZONE        where (gcloud compute tpus locations list)
# TYPE        accelerator type: v4-64, v5litepod-16, v5p-128, v6e-16, tpu7x-128
# CONFIG      what to train
# WORKDIR     the run's folder, in a bucket (gs://...): the disk of a host is lost with the host
# REPOSITORY  where to clone this project from
# SPOT=1      use preemptible capacity, at a fraction of the price
# ARGUMENTS   further settings for fit, such as "--mesh.fsdp -1 --mesh.data 1"
# PROJECT     gcloud's default project if not set
# DRY_RUN=1   print the commands instead of running them
# shellcheck disable=SC2153 # the caller sets the variables in capitals
set -eu
cd "$(dirname "$0")"
# shellcheck source=cloud/common.sh
. ./common.sh

PREEMPTED=75 # exit status of `fit` after it was told to stop and has saved a checkpoint
PAUSE="${PAUSE:-60}"

tpus() {
	run gcloud compute tpus "$@" --zone "$ZONE" ${PROJECT:+--project "$PROJECT"}
}

# Print the image for this accelerator type.
image() {
	case "$TYPE" in
	v4-*) echo tpu-ubuntu2204-base ;;
	v5litepod-*) echo v2-alpha-tpuv5-lite ;;
	v5p-*) echo v2-alpha-tpuv5 ;;
	v6e-*) echo v2-alpha-tpuv6e ;;
	tpu7x-*) echo v2-alpha-tpu7-ubuntu2404 ;;
	*)
		echo "$0: TYPE $TYPE: is not known; give v4-N, v5litepod-N, v5p-N, v6e-N or tpu7x-N" >&2
		exit 2
		;;
	esac
}

state() {
	if [ -n "${DRY_RUN:-}" ]; then
		echo ACTIVE
	else
		tpus queued-resources describe "$NAME" --format 'value(state.state)' 2>/dev/null || echo NONE
	fi
}

everywhere() {
	tpus tpu-vm ssh "$NAME" --worker all --command "$1"
}

up() {
	local chosen
	chosen="$(image)"
	case "$(state)" in
	SUSPENDED | SUSPENDING | FAILED) down ;; # preempted: request a new one
	esac
	if [ "$(state)" = NONE ] || [ -n "${DRY_RUN:-}" ]; then
		tpus queued-resources create "$NAME" --node-id "$NAME" \
			--accelerator-type "$TYPE" --runtime-version "$chosen" ${SPOT:+--spot}
	fi
	until [ "$(state)" = ACTIVE ]; do
		case "$(state)" in
		FAILED | NONE)
			echo "$NAME: was not granted; see cloud/tpu_vm.sh status" >&2
			return 1
			;;
		esac
		sleep "$PAUSE"
	done
}

# Print the script that `setup` runs on every host. It can be repeated.
setup_script() {
	printf 'repository=%q\n' "$REPOSITORY"
	cat <<'SCRIPT'
set -eu
# uv downloads Python 3.12 where it is missing: the image for v4 has 3.10, which is too old, and
# its pip may be missing. A command over ssh reads no profile, so PATH has to be set here.
export PATH="$HOME/.local/bin:$PATH"
if ! command -v uv >/dev/null; then
	curl -LsSf https://astral.sh/uv/install.sh | env UV_INSTALL_DIR="$HOME/.local/bin" sh
fi
# The first setup and a repeated one are the same: fetch from the address that is given now.
git init --quiet it
cd it
git fetch --quiet --depth 1 "$repository" HEAD
git reset --quiet --hard FETCH_HEAD
uv venv --quiet --allow-existing --python 3.12 .venv
# Editable: uv does not install a plain `.` again if only the code has changed.
uv pip install --quiet --python .venv/bin/python -c constraints.txt -e '.[tpu]' gcsfs
SCRIPT
}

setup() {
	everywhere "$(setup_script)"
}

fit() {
	everywhere "cd it && .venv/bin/python -m train fit $(printf %q "$CONFIG") \
--workdir $(printf %q "$WORKDIR") ${ARGUMENTS:-}"
}

train() {
	local status
	while :; do
		status=0
		up && setup && fit || status=$?
		if [ "$status" = 0 ]; then
			down
			return 0
		fi
		if [ "$status" != "$PREEMPTED" ] && [ "$(state)" = ACTIVE ]; then
			echo "$NAME: training ended with status $status on a TPU that is still there;" \
				"look at it, then cloud/tpu_vm.sh train or down" >&2
			return "$status"
		fi
		echo "$NAME: was preempted; asking for another" >&2
		sleep "$PAUSE"
	done
}

status() {
	tpus queued-resources describe "$NAME"
}

down() {
	tpus queued-resources delete "$NAME" --force --quiet
}

case "${1:-}" in
up | setup | fit | train | status | down) ;;
*)
	echo "usage: cloud/tpu_vm.sh up | setup | fit | train | status | down" >&2
	exit 2
	;;
esac
need NAME ZONE TYPE
case "$1" in
setup | train) need REPOSITORY ;;
esac
case "$1" in
fit | train)
	need CONFIG WORKDIR
	need_remote_workdir
	;;
esac
program gcloud "see cloud.google.com/sdk"
"$1"
