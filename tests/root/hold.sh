# SPDX-License-Identifier: Apache-2.0
# Sourced by enter.sh: a hold on the layers of a root, which build.py respects when it removes old ones.

# hold_layers LAYERS: holds the folders, separated by colons, until this process and those that have `held` open ended.
# Fails where one has been removed since it was built.
hold_layers() {
    held=()
    local layers layer file
    IFS=: read -ra layers <<<"$1"
    for layer in "${layers[@]}"; do
        [[ -d $layer ]] || return 1
        exec {file}<"$layer"
        held+=("$file")
        flock --shared "$file"
        [[ $layer -ef /proc/self/fd/$file ]] || return 1
    done
}
