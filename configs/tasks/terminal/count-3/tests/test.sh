# The number alone.
[ "$(tr -d " " < new.txt)" = 4 ] || exit 1
