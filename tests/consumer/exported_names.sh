#!/usr/bin/env bash
# exported_names.sh LIBRARY: libpacer.so exports what is public in pacer and nothing else.
set -euo pipefail
names=$(nm -D --defined-only "$1" | awk '{ print $NF }')

# must_be_none WHAT NAMES
must_be_none() {
  [[ -z $2 ]] || {
    printf '%s\n' "$1:" "$2" | c++filt | head -n 20
    exit 1
  }
}

# What stands before a name's first namespace: the kind of thing that it names.
kind='_Z(N|NK|NR|NO|NKR|NKO|T[VIST]N|T[hv][n0-9_]*_N|ZN|ZNK|GVN|GVZN|GVZNK)'
must_be_none "These exported names are not in pacer" "$(grep -vE "^${kind}5pacer" <<<"$names" || true)"
# Inline functions of public headers call these two.
must_be_none "These exported names are private" \
  "$(grep -E "^${kind}5pacer6detail" <<<"$names" | grep -vE '6detail(17region_is_running|10remembered)' || true)"
count=$(wc -l <<<"$names")
((count > 500)) || {
  echo "Only $count names are exported."
  exit 1
}
echo "$count names are exported, all public."
