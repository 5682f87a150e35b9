# The number alone.
[ "$(tr -d " " < out.txt)" = 4 ] || exit 1
