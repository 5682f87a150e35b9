# A directory of that name exists.
[ -d data ] || exit 1
