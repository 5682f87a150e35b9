# The number alone.
[ "$(tr -d " " < new.txt)" = 2 ] || exit 1
