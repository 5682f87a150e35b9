# The name of the file is only seen in the listing; the file itself stays.
[ "$(cat new.txt)" = red ] && [ -e apple.txt ] || exit 1
