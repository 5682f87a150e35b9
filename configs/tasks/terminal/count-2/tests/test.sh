# The number alone.
[ "$(tr -d " " < out.txt)" = 3 ] || exit 1
