#!/usr/bin/env bash
# Train on a TPU slice in Google Kubernetes Engine, as a JobSet (cloud/jobset.yaml).
#
#   NAME=llama IMAGE=us-docker.pkg.dev/you/images/it:1 CHIP=tpu-v5p-slice TOPOLOGY=4x4x4 HOSTS=16 \
#   CONFIG=llama:3-8b WORKDIR=gs://bucket/runs/llama cloud/gke.sh up
#
#   up     start; the JobSet restarts hosts that fail or are preempted, and the run resumes
#   show   print the JobSet
#   logs   show the output of the first host
#   down   stop and release the hosts: they cost money until then
#   xpk    print the equivalent xpk command, for clusters created with xpk
#
# NAME      of the JobSet               CONFIG     what to train
# IMAGE     built from cloud/Dockerfile  WORKDIR    the run's folder, in a bucket (gs://...)
# CHIP      tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, tpu7x
# TOPOLOGY  of the slice: 4x4x4          HOSTS      chips of the slice divided by CHIPS
# CHIPS     of one host (4 if not set)   CLUSTER, TYPE  only for xpk: v5p-128
# ARGUMENTS further settings for fit     DRY_RUN=1  print the commands only
# shellcheck disable=SC2153 # the caller sets the variables in capitals
set -eu
cd "$(dirname "$0")"
# shellcheck source=cloud/common.sh
. ./common.sh

# Print the JobSet with its variables filled in.
show() {
	python3 - jobset.yaml <<'PYTHON'
import json, os, pathlib, re, shlex, sys
arguments = ["fit", os.environ["CONFIG"], "--workdir", os.environ["WORKDIR"]]
arguments += shlex.split(os.environ.get("ARGUMENTS", ""))
known = {**os.environ, "ARGUMENTS_JSON": json.dumps(arguments)}
text = pathlib.Path(sys.argv[1]).read_text()
print(re.sub(r"\$\{(\w+)\}", lambda found: known[found[1]], text), end="")
PYTHON
}

up() {
	if [ -n "${DRY_RUN:-}" ]; then
		run kubectl apply -f -
		show
	else
		show | kubectl apply -f -
	fi
}

logs() {
	run kubectl logs --follow "job/$NAME-host-0"
}

down() {
	run kubectl delete jobset "$NAME"
}

xpk() {
	need CLUSTER TYPE
	DRY_RUN=1 run xpk workload create --cluster "$CLUSTER" --workload "$NAME" \
		--docker-image "$IMAGE" --tpu-type "$TYPE" --max-restarts 100 \
		--command "python -m train fit $CONFIG --workdir $WORKDIR ${ARGUMENTS:-}"
}

case "${1:-}" in
up | show | xpk)
	need NAME IMAGE CHIP TOPOLOGY HOSTS CONFIG WORKDIR
	need_remote_workdir
	;;
logs | down) need NAME ;;
*)
	echo "usage: cloud/gke.sh up | show | logs | down | xpk" >&2
	exit 2
	;;
esac
export CHIPS="${CHIPS:-4}"
case "$1" in
up | logs | down) program kubectl "see kubernetes.io/docs/tasks/tools" ;;
esac
"$1"
