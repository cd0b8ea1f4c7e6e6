#!/usr/bin/env bash
# The secrets of a run, made on your machine: deploy/k8s/secrets.sh FOLDER [NAMESPACE] | kubectl apply -f -
#   FOLDER      kept by you: tokens of every role, the operator's too, and the password of Redis. Made if it is not there.
#   NAMESPACE   default: bapo
# Needs `bapo` and kubectl on the path; talks to no cluster by itself. To replace a token: bapo tokens rotate FOLDER worker,
# apply again, and when all pods have it (kubelet takes about a minute): bapo tokens retire FOLDER worker, apply again.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
folder=$1 namespace=${2:-bapo}
bapo tokens create "$folder" --redis >&2
ray=$folder/ray/auth_token
if [ ! -f "$ray" ]; then
    (umask 077; mkdir -p "$folder/ray"; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$ray")
fi
secret() {
    kubectl create secret generic "$1" --namespace "$namespace" --from-file="$2" --dry-run=client --output yaml
    echo ---
}
for role in worker learner scheduler evaluator agent viewer; do secret "bapo-$role" "token=$folder/$role/token"; done
secret bapo-accepted "tokens=$folder/accepted/tokens"
secret bapo-redis "password=$folder/redis/password"
secret bapo-redis-acl "users.acl=$folder/acl/users.acl"
secret bapo-ray "auth_token=$ray"
