#!/usr/bin/env bash
# Record (or take a trace), fit, compare with last week, report. Exit code 8: slower; others as in docs/how-to/gate.md.
#     nightly.sh URL|TRACE FOLDER
set -euo pipefail
source=${1:?URL of a server, or a trace} kept=${2:?folder that is kept}
days=${LATFIT_DAYS:-7} keep=${LATFIT_KEEP:-35} path=${LATFIT_PATH:-}
today=$(date -u +%Y-%m-%d)
folder="$kept/$today"
mkdir -p "$folder"
rm -f "$folder/good"

# The newest good day that is old enough, else the oldest.
limit=$(date -u -d "$today - $days days" +%Y-%m-%d)
baseline=""
for each in "$kept"/????-??-??; do
    [ -e "$each/good" ] && [ "$each" != "$folder" ] || continue
    [ -n "$baseline" ] && [[ "$(basename "$each")" > "$limit" ]] || baseline=$each
done

measured() {
    if [[ "$source" == http://* || "$source" == https://* ]]; then
        latfit record "$source" --duration "${LATFIT_DURATION:-10min}" --path "${path:-gpu}" --out "$folder/trace.parquet"
    else
        latfit ingest "$source" --out "$folder/trace.parquet"
    fi
}
fitted() {
    latfit fit "$folder/trace.parquet" ${path:+--path "$path"} --out "$folder/fit.json" --hardware "$folder/hardware.json"
}
reported() {
    latfit report --hardware "$folder/hardware.json" --out "$folder/report"
}
: >"$folder/log.txt"
for part in measured fitted reported; do
    $part >>"$folder/log.txt" 2>&1 || { code=$?; tail -n 3 "$folder/log.txt" >&2; exit "$code"; }
done

code=0
if [ -n "$baseline" ]; then
    latfit compare "$baseline/trace.parquet" "$folder/trace.parquet" --tolerance "${LATFIT_TOLERANCE:-5%}" \
        >"$folder/compare.txt" 2>&1 || code=$?
    cat "$folder/compare.txt"
else
    echo "The first night: $folder is the baseline of those that follow."
fi
[ "$code" != 0 ] || touch "$folder/good"
# A run that a load generator measured at the planned load, where there is one.
if [ -n "${LATFIT_PLAN:-}" ] && [ -n "${LATFIT_RUN:-}" ]; then
    latfit ledger add "$LATFIT_PLAN" "$LATFIT_RUN" --ledger "$kept/ledger.json" || code=$?
fi

# Days beyond those that are kept; never the only good one.
ls -d "$kept"/????-??-?? | head -n -"$keep" | while read -r old; do
    [ "$old" = "$baseline" ] || rm -r -- "$old"
done
exit "$code"
