# The name of the file is only seen in the listing; the file itself stays.
[ "$(cat out.txt)" = gold ] && [ -e fig.txt ] || exit 1
