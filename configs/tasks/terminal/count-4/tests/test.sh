# The number alone.
[ "$(tr -d " " < out.txt)" = 2 ] || exit 1
