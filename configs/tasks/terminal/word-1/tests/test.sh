# Two looks are needed: which file, and which word.
[ "$(cat new.txt)" = blue ] && [ -e apple.txt ] || exit 1
