# Both directories exist.
[ -d a/b ] || exit 1
