#!/usr/bin/env bash
# A Slurm cluster of one node for tests, beside whatever else the machine has: daemons, sockets, keys and state of its
# own in one folder, on the loopback interface. Needs root, and Debian's packages slurm-wlm and munge.
#
#   tests/tools/one_node_slurm.sh start FOLDER   # then: export SLURM_CONF=FOLDER/slurm.conf
#   tests/tools/one_node_slurm.sh stop FOLDER
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

usage() { echo "usage: $0 start|stop FOLDER" >&2; exit 2; }
[ $# -eq 2 ] || usage
mkdir -p "$2"
folder=$(cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf

missing() {
  for program in munged slurmctld slurmd sbatch srun squeue scontrol; do
    command -v "$program" > /dev/null || { echo "no $program: apt-get install slurm-wlm munge"; return; }
  done
  [ "$(id -u)" -eq 0 ] || echo "not root, as whom slurmd has to run"
}

configure() {
  local host port
  host=$(hostname -s)
  port=$((20000 + RANDOM % 20000))
  mkdir -p "$folder"/{state,spool,munge}
  chmod 711 "$folder"
  chmod 700 "$folder/munge"
  head -c 1024 /dev/urandom > "$folder/munge/key"
  chmod 400 "$folder/munge/key"
  cat > "$SLURM_CONF" << CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=60
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=common Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
CONF
}

start() {
  local reason
  reason=$(missing)
  [ -z "$reason" ] || { echo "cannot start Slurm here: $reason" >&2; exit 3; }
  configure
  # --force: the folder may be one that others could write to, as /tmp is.
  munged --force --num-threads=1 --key-file="$folder/munge/key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" 2> "$folder/munged.err" \
    || { cat "$folder/munged.err" >&2; exit 3; }
  slurmctld
  slurmd
  for _ in $(seq 100); do
    sinfo --noheader --format=%T 2> /dev/null | grep -q idle && { echo "started: export SLURM_CONF=$SLURM_CONF"; return; }
    sleep 0.2
  done
  echo "cannot start Slurm here: the node did not become idle; see $folder/*.log" >&2
  tail -n 5 "$folder"/slurm*.log >&2
  stop
  exit 3
}

stop() {
  if [ -f "$SLURM_CONF" ]; then scancel --user=root 2> /dev/null || true; fi
  for file in "$folder/slurmd.pid" "$folder/slurmctld.pid" "$folder/munge/pid"; do
    if [ -f "$file" ]; then
      local pid
      pid=$(cat "$file")
      kill "$pid" 2> /dev/null || true
      for _ in $(seq 100); do kill -0 "$pid" 2> /dev/null || break; sleep 0.1; done
    fi
  done
}

case $1 in start) start ;; stop) stop ;; *) usage ;; esac
