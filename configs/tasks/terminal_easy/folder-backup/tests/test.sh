# A directory of that name exists.
[ -d backup ] || exit 1
