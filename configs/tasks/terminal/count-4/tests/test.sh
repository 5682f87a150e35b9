# The number alone.
[ "$(tr -d " " < out.txt)" = 5 ] || exit 1
