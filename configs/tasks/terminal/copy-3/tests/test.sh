# The name of the file is only seen in the listing; the file itself stays.
[ "$(cat new.txt)" = green ] && [ -e plum.txt ] || exit 1
