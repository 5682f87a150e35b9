# The name of the file is only seen in the listing; the file itself stays.
[ "$(cat out.txt)" = blue ] && [ -e pear.txt ] || exit 1
