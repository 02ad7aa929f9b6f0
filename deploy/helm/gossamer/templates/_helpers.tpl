{{- define "gossamer.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{/* The labels of all objects; (dict "root" . "component" "trainer"), component may be empty. */}}
{{- define "gossamer.labels" -}}
{{ include "gossamer.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "gossamer.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Whom trainers join: the bootstrap peers by name, which stay the same when they move, and nodes elsewhere. */}}
{{- define "gossamer.joins" -}}
{{- $name := include "gossamer.name" . -}}
{{- $joins := .Values.join -}}
{{- range $i := until (int .Values.bootstrap.replicas) -}}
{{- $joins = append $joins (printf "%s-bootstrap-%d.%s-bootstrap.%s.svc:7700" $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- join " " $joins -}}
{{- end }}

{{- define "gossamer.token" -}}
{{ .Values.adminToken.existingSecret | default (printf "%s-admin" (include "gossamer.name" .)) }}
{{- end }}

{{/* The Secret with the keys, if pods of this kind have theirs from one. (dict "root" . "kind" .Values.trainers) */}}
{{- define "gossamer.keys" -}}
{{- if .root.Values.keys.existingSecret }}{{ .root.Values.keys.existingSecret }}
{{- else if not .kind.persistence.enabled }}{{ include "gossamer.name" .root }}-keys
{{- end }}
{{- end }}

{{- define "gossamer.invitations" -}}
{{- if .Values.invitations.existingSecret }}{{ .Values.invitations.existingSecret }}
{{- else if .Values.invitations.byPod }}{{ include "gossamer.name" . }}-invitations
{{- end }}
{{- end }}

{{/* A StatefulSet. (dict "root" . "component" "trainer" "kind" .Values.trainers "command" LIST "env" YAML) */}}
{{- define "gossamer.statefulset" -}}
{{- $values := .root.Values }}
{{- $name := printf "%s-%s" (include "gossamer.name" .root) .component }}
{{- $keys := include "gossamer.keys" . }}
{{- $invitations := include "gossamer.invitations" .root }}
{{- $prefix := ternary "GOSSAMER_BOOTSTRAP" "GOSSAMER_NODE" (eq .component "bootstrap") }}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "gossamer.labels" . | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" .kind.replicas) }}
  replicas: {{ .kind.replicas }}
  {{- end }}
  serviceName: {{ $name }}
  # Nobody waits for another: each node looks for the others until they are there.
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "gossamer.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "gossamer.selector" . | nindent 8 }}
      annotations:
        kubectl.kubernetes.io/default-container: node
        # Without this the autoscaler takes no machine away on which a pod has one of these volumes.
        cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes: data,tmp,shm
        {{- with .kind.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      {{- with $values.serviceAccount.name }}
      serviceAccountName: {{ . }}
      {{- end }}
      {{- with $values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .kind.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      terminationGracePeriodSeconds: {{ .kind.terminationGracePeriodSeconds | default 30 }}
      securityContext:
        {{- toYaml $values.podSecurityContext | nindent 8 }}
      containers:
        - name: node
          image: "{{ $values.image.repository }}:{{ $values.image.tag | default .root.Chart.AppVersion }}"
          imagePullPolicy: {{ $values.image.pullPolicy }}
          {{- .command | nindent 10 }}
          env:
            - name: POD_NAME
              valueFrom: { fieldRef: { fieldPath: metadata.name } }
            - name: {{ $prefix }}_NAME
              value: $(POD_NAME)
            - name: {{ $prefix }}_DIR
              value: /var/lib/gossamer/node
            - name: {{ $prefix }}_LISTEN
              value: "[::]:7700"
            - name: {{ $prefix }}_ADMIN
              value: "[::]:7780"
            - name: {{ $prefix }}_LOG_JSON
              value: "true"
            - name: GOSSAMER_ADMIN_TOKEN
              valueFrom: { secretKeyRef: { name: {{ include "gossamer.token" .root }}, key: token } }
            {{- if $keys }}
            - name: GOSSAMER_KEY_FILE
              value: /etc/gossamer/keys/$(POD_NAME)
            {{- end }}
            {{- if $invitations }}
            - name: {{ $prefix }}_INVITE
              value: /etc/gossamer/invitations/$(POD_NAME)
            {{- end }}
            {{- .env | nindent 12 }}
            {{- with .kind.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - { name: peer, containerPort: 7700 }
            - { name: admin, containerPort: 7780 }
          # A trainer that waits for the first bootstrap peer listens nowhere yet, and may wait for days.
          startupProbe:
            httpGet: { path: /livez, port: admin }
            periodSeconds: 5
            timeoutSeconds: 10
            failureThreshold: 1000000
          # Whether the event loop answers: a node that is alone, joins, or has a full disk goes on. Five minutes, since the
          # supervisor starts a daemon that died again, which then reads its model.
          livenessProbe:
            httpGet: { path: /livez, port: admin }
            periodSeconds: 15
            timeoutSeconds: 10
            failureThreshold: 20
          readinessProbe:
            httpGet: { path: /readyz, port: admin }
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 3
          resources:
            {{- toYaml .kind.resources | nindent 12 }}
          securityContext:
            {{- toYaml $values.containerSecurityContext | nindent 12 }}
          volumeMounts:
            - { name: data, mountPath: /var/lib/gossamer }
            - { name: tmp, mountPath: /tmp }
            {{- if .kind.shm }}
            - { name: shm, mountPath: /dev/shm }
            {{- end }}
            {{- if and (eq .component "bootstrap") $values.manifest }}
            - { name: manifest, mountPath: /etc/gossamer/swarm, readOnly: true }
            {{- end }}
            {{- if $keys }}
            - { name: keys, mountPath: /etc/gossamer/keys, readOnly: true }
            {{- end }}
            {{- if $invitations }}
            - { name: invitations, mountPath: /etc/gossamer/invitations, readOnly: true }
            {{- end }}
            {{- with .kind.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- if not .kind.persistence.enabled }}
        - { name: data, emptyDir: { sizeLimit: {{ .kind.persistence.size }} } }
        {{- end }}
        - { name: tmp, emptyDir: {} }
        {{- with .kind.shm }}
        - { name: shm, emptyDir: { medium: Memory, sizeLimit: {{ . }} } }
        {{- end }}
        {{- if and (eq .component "bootstrap") $values.manifest }}
        - { name: manifest, configMap: { name: {{ include "gossamer.name" .root }}-manifest } }
        {{- end }}
        {{- if $keys }}
        - { name: keys, secret: { secretName: {{ $keys }}, defaultMode: 0440 } }
        {{- end }}
        {{- if $invitations }}
        - { name: invitations, secret: { secretName: {{ $invitations }}, defaultMode: 0440 } }
        {{- end }}
        {{- with .kind.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $values.spread }}
      topologySpreadConstraints:
        {{- $selector := include "gossamer.selector" . }}
        {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- $selector | nindent 14 }}
        {{- end }}
      {{- end }}
      {{- with .kind.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .kind.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if or .kind.spot .kind.tolerations }}
      tolerations:
        {{- if .kind.spot }}
        - { key: cloud.google.com/gke-spot, operator: Exists }
        - { key: kubernetes.azure.com/scalesetpriority, operator: Equal, value: spot }
        - { key: nvidia.com/gpu, operator: Exists }
        {{- end }}
        {{- with .kind.tolerations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
  {{- if .kind.persistence.enabled }}
  # A node that is scaled away and comes back finds its folder, and with it its key.
  persistentVolumeClaimRetentionPolicy: { whenDeleted: Retain, whenScaled: Retain }
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [{{ .kind.persistence.accessMode }}]
        {{- with .kind.persistence.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .kind.persistence.size }}
  {{- end }}
---
# Names for the pods, also before they are ready: others have to reach a node for it to become so.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "gossamer.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "gossamer.selector" . | nindent 4 }}
  ports:
    - { name: peer, port: 7700, targetPort: peer }
    - { name: admin, port: 7780, targetPort: admin }
{{- end }}
